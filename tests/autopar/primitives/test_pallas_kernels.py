"""Pallas kernels run on the part of their grid that the shards of a device hold."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autopar
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh
from autopar.primitives import kernel_of, op_factors
from autopar.primitives.factors import OpFactors
from autopar.testing import assert_allclose
from tests.autopar.sharding.equation_cases import ints
from tests.autopar.sharding.shard_by_shard import check, equations
from tests.tiers import slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention

MESHES = [LogicalMesh((2, 4), ("x", "y")), LogicalMesh((4,), ("x",))]


def tiled_matmul(x: Any, y: Any) -> Any:
    """Multiply matrices in tiles of 2 by 4, with all of the contracted dim in each."""

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...]

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(m // 2, n // 4),
        in_specs=[
            pl.BlockSpec((2, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, 4), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((2, 4), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        interpret=True,
    )(x, y)


def along_rows(kernel: Any, x: Any, *, block: int = 2, **options: Any) -> Any:
    """Run a kernel on blocks of rows."""
    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        **{"grid": (pl.cdiv(x.shape[0], block),), "in_specs": [spec], "out_specs": spec} | options,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x)


def double_of(x: Any) -> Any:
    def kernel(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    return along_rows(kernel, x)


def grouped_queries(queries: Any, keys: Any) -> Any:
    """Multiply each head of queries with the head of keys that two of them share."""

    def kernel(query: Any, key: Any, out: Any) -> None:
        out[...] = query[...] * key[...]

    heads, size = queries.shape
    spec = pl.BlockSpec((None, size), lambda head: (head, 0))
    return pl.pallas_call(
        kernel,
        grid=(heads,),
        in_specs=[spec, pl.BlockSpec((None, size), lambda head: (head // 2, 0))],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        interpret=True,
    )(queries, keys)


def blocks_plus_number(x: Any) -> Any:
    """Add to each block its number."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] + pl.program_id(0).astype(x.dtype)

    return along_rows(kernel, x)


def sum_of_blocks(x: Any) -> Any:
    """Add all blocks to one."""

    def kernel(x: Any, out: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += x[...]

    rows, columns = x.shape
    return pl.pallas_call(
        kernel,
        grid=(columns // 4, rows // 2),
        in_specs=[pl.BlockSpec((2, 4), lambda j, i: (i, j))],
        out_specs=pl.BlockSpec((2, 4), lambda j, i: (0, j)),
        out_shape=jax.ShapeDtypeStruct((2, columns), x.dtype),
        interpret=True,
    )(x)


def reversed_blocks(x: Any) -> Any:
    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...]

    blocks = x.shape[0] // 2
    backwards = pl.BlockSpec((2, x.shape[1]), lambda i: (blocks - 1 - i, 0))
    return along_rows(kernel, x, in_specs=[backwards])


def kernel_equation(fun: Any, *args: Any) -> tuple[Any, list[Any], OpFactors]:
    """Return the only kernel of a function, its operands and its factors."""
    ((eqn, operands),) = equations("pallas_call", fun, args)
    return eqn, operands, op_factors(eqn)


def sharded_dims(eqn: Any, factors: OpFactors) -> list[tuple[int, ...]]:
    """Return for each operand and result the dims that can be sharded."""
    return [
        tuple(dim for dim, of in enumerate(array) if of and factors.kinds[of[0]] == "parallel")
        for array in (*factors.operands, *factors.results)
    ]


@pytest.mark.parametrize(
    ("fun", "args", "dims"),
    [
        (tiled_matmul, (ints(16, 3), ints(3, 32)), [(0,), (1,), (0, 1)]),
        (double_of, (ints(16, 3),), [(0,), (0,)]),
        (grouped_queries, (ints(16, 4), ints(8, 4)), [(0,), (0,), (0,)]),
        (sum_of_blocks, (ints(8, 32),), [(1,), (1,)]),
        (jax.vmap(blocks_plus_number), (ints(8, 16, 3),), [(0,), (0,)]),
        (jax.vmap(double_of), (ints(8, 16, 3),), [(0, 1), (0, 1)]),
    ],
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_independent_axes_of_a_grid_are_sharded(fun, args, dims, mesh):
    eqn, operands, factors = kernel_equation(fun, *args)
    assert sharded_dims(eqn, factors) == dims
    assert check(eqn, operands, mesh) > 1


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (blocks_plus_number, (ints(16, 3),)),  # the kernel reads its position
        (reversed_blocks, (ints(16, 3),)),  # blocks change places
        (double_of, (ints(15, 3),)),  # the last block is padded
    ],
)
def test_other_axes_of_a_grid_are_whole(fun, args):
    eqn, _, factors = kernel_equation(fun, *args)
    assert not any(sharded_dims(eqn, factors))
    assert len(factors.assignments(MESHES[0])) == 1


def test_steps_that_pass_scratch_memory_on_run_on_one_device():
    pltpu = pytest.importorskip("jax.experimental.pallas.tpu")

    def kernel(x: Any, out: Any, carry: Any) -> None:
        carry[...] = carry[...] + x[...]
        out[...] = carry[...]

    def running_sum(x: Any) -> Any:
        return along_rows(kernel, x, scratch_shapes=[pltpu.VMEM((2, 3), np.float32)])

    eqn, _, factors = kernel_equation(running_sum, ints(16, 3))
    assert not any(sharded_dims(eqn, factors))


def test_shared_heads_stay_with_their_queries():
    """Two query heads share a head of keys, so four devices have two queries and a key each."""
    _, _, factors = kernel_equation(grouped_queries, ints(8, 4), ints(4, 4))
    assert len(factors.assignments(LogicalMesh((4,), ("x",)))) == 2
    assert len(factors.assignments(LogicalMesh((8,), ("x",)))) == 1


def first_blocks(x: Any) -> Any:
    """Double the first half of the blocks of 2 rows."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    rows, columns = x.shape
    spec = pl.BlockSpec((2, columns), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows // 4,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((rows // 2, columns), x.dtype),
        interpret=True,
    )(x)


def test_the_bytes_of_a_kernel_are_those_of_the_blocks_that_it_visits():
    eqn, _, _ = kernel_equation(first_blocks, ints(16, 4))
    item = aval_of(eqn.invars[0]).dtype.itemsize
    assert kernel_of(eqn, 1e9).bytes == 2 * 8 * 4 * item
    eqn, _, _ = kernel_equation(tiled_matmul, ints(16, 3), ints(3, 32))
    assert kernel_of(eqn, 1e9).bytes == (16 * 3 + 3 * 32 + 16 * 32) * item


BLOCKS = attention.BlockSizes(
    **dict.fromkeys(("block_q", "block_k", "block_q_dkv", "block_kv_dkv"), 16),
    **dict.fromkeys(("block_q_dq", "block_kv_dq"), 16),
)


def attend(queries: Any, keys: Any, values: Any) -> Any:
    return attention.mha(
        queries, keys, values, None, block_sizes=BLOCKS, interpret=True, causal=True
    )


def test_the_flop_of_a_kernel_are_those_of_its_grid():
    eqn, _, _ = kernel_equation(tiled_matmul, ints(16, 3), ints(3, 32))
    assert kernel_of(eqn).flops == 2 * 16 * 3 * 32
    assert kernel_of(eqn, 0.0, [(8, 3), (3, 16), (8, 16)]).flops == 2 * 8 * 3 * 16


def test_the_flop_of_attention_are_near_those_of_its_products():
    queries = jnp.ones((2, 64, 4, 32))
    eqn, _, _ = kernel_equation(attend, queries, queries, queries)
    kernel = kernel_of(eqn)
    products = 2 * 2 * (2 * 4 * 64 * 64 * 32)
    assert kernel.kind == "gemm"
    assert products < kernel.flops < 1.5 * products


def attention_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        queries, keys, values = (jnp.einsum("bsd,dhe->bshe", batch["x"], params[k]) for k in "qkv")
        out = jnp.einsum("bshe,hed->bsd", attend(queries, keys, values), params["o"])
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def attention_arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / 4

    params = {k: array(32, 4, 16) for k in "qkv"} | {"o": array(4, 16, 32)}
    return params, {"x": array(8, 32, 32), "y": array(8, 32, 32)}


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4), num_micro_batches=2),
        *slow(autopar.ShardParallel((2, 4)), autopar.Zero3Parallel(8)),
    ],
    ids=["in microbatches", "sharded", "zero3"],
)
def test_attention_in_pallas_equals_one_device(method):
    args = attention_arguments()
    step = autopar.parallelize(attention_step, method=method)
    assert_allclose(step(*args), jax.jit(attention_step)(*args), rtol=1e-5, atol=1e-5)
    plan = step.get_executable(*args).plan
    assert not plan.warnings
    kernels = [c for c in plan.stages[0].constraints if c.side == "out" and len(c.shape) == 4]
    assert any(spec for c in kernels for spec in c.spec)
