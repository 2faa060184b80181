"""Steps with Pallas kernels and calls of libraries, planned and predicted for absent GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

import autopar
from simulator import Kernel, Program, kernel_costs
from simulator.array_type import Array

M, K, N = 4096, 128, 256
ARGUMENTS = (
    {"w": jax.ShapeDtypeStruct((K, N), jnp.bfloat16)},
    {"x": jax.ShapeDtypeStruct((M, K), jnp.bfloat16)},
)


@pytest.fixture(autouse=True)
def _own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_costs, "_COSTS", {})


def tiled_product(params: Any = None, **options: Any) -> Callable[[Any, Any], jax.Array]:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    return pl.pallas_call(
        kernel,
        grid=(M // 64, N // 64),
        in_specs=[
            pl.BlockSpec((64, K), lambda i, j: (i, 0)),
            pl.BlockSpec((K, 64), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        name="tiled_product",
        compiler_params=params,
        **options,
    )


def library_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("te_gemm_ffi", jax.ShapeDtypeStruct((M, N), x.dtype))(x, w)


def step_with(product: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    def step(params: Any, batch: Any) -> Any:
        mean = product(batch["x"], params["w"]).mean()
        return {"w": params["w"] * mean}, mean

    return step


def programs(product: Callable[[Any, Any], jax.Array]) -> tuple[Program, Program]:
    """Return the analytic and the compiled program of a step on 8 H100."""
    step = step_with(product)
    plan = autopar.plan_step(step, ARGUMENTS, cluster="dgx_h100")
    analytic = autopar.compile_step(step, ARGUMENTS, plan, "dgx_h100", fidelity="analytic")
    return analytic, autopar.compile_step(step, ARGUMENTS, plan, "dgx_h100")


def costs(program: Program) -> list[tuple[str, float, float, str]]:
    """Return kind, FLOP, bytes and sort of the kernels with FLOP or without a model."""
    (body,) = program.bodies.values()
    kernels = [op for op in body if isinstance(op, Kernel)]
    return [
        (op.kind, op.flops, op.bytes, op.unmodelled)
        for op in kernels
        if op.kind != "memory" or op.unmodelled
    ]


@pytest.mark.parametrize(
    "params",
    [None, triton.CompilerParams(), mosaic_gpu.CompilerParams()],
    ids=["default", "triton", "mosaic"],
)
def test_a_pallas_kernel_compiles_with_the_cost_of_its_grid(params):
    analytic, compiled = programs(tiled_product(params))
    rows = M  # of the fastest plan for a step this small: each device computes all rows
    cost = ("gemm", 2 * rows * K * N, 2 * (rows * K + K * N + rows * N), "")
    assert costs(analytic) == costs(compiled) == [cost]
    (memory,) = compiled.memory
    assert memory.temporaries >= 2 * rows * N  # the kernel's result


def test_a_registered_cost_prices_both_programs():
    shapes: list[list[tuple[int, ...]]] = []

    def cost(operands: Sequence[Array], results: Sequence[Array]) -> autopar.KernelCost:
        shapes.append([x.dims for x in (*operands, *results)])
        assert {x.dtype for x in (*operands, *results)} == {"bf16"}
        return autopar.KernelCost(10.0, 20.0, "attention")

    autopar.register_kernel_cost("tiled_product", cost)
    shards = [(M // 8, K), (K, N), (M // 8, N)]
    both = programs(tiled_product())
    assert shards in shapes
    for program in both:
        assert costs(program) == [("attention", 10.0, 20.0, "")]


def test_a_library_call_without_a_cost_is_named_and_counted():
    analytic, compiled = programs(library_product)
    assert analytic.unmodelled_kernels() == {"te_gemm_ffi": 1}
    assert compiled.unmodelled_kernels() == {"custom-call te_gemm_ffi": 1}
    (memory,) = compiled.memory
    assert memory.temporaries >= 2 * M * N
    autopar.register_kernel_cost("te_gemm_ffi", lambda *_: autopar.KernelCost(10.0, 20.0, "gemm"))
    for program in programs(library_product):
        assert program.unmodelled_kernels() == {}
        assert costs(program) == [("gemm", 10.0, 20.0, "")]


def test_a_kernel_in_interpret_mode_runs_after_compilation_for_a_cluster():
    programs(tiled_product())
    x, w = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.bfloat16)
    assert jnp.all(tiled_product(interpret=True)(x, w) == K)
