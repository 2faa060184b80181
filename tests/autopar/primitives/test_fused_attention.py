"""cuDNN's fused attention is planned as attention: by sequence, by head, and by query."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.flatten import flatten
from autopar.ir.spec import LogicalMesh
from autopar.primitives import kernel_of, op_factors
from autopar.primitives.fused_attention import check_capability
from autopar.testing import assert_allclose
from simulator import ClusterError, Kernel, load_cluster
from tests.autopar.primitives.cudnn_reference import attend, gradients
from tests.autopar.primitives.test_pallas_kernels import attention_arguments, sharded_dims
from tests.autopar.sharding.equation_cases import ints
from tests.autopar.sharding.shard_by_shard import check_all, equations
from tests.tiers import slow

BATCH, LENGTH, KEYS, HEADS, SIZE = 4, 8, 16, 4, 8
FORWARD, BACKWARD = (f"dot_product_attention_{name}_wrapper" for name in ("fwd", "bwd"))


def arrays(key_heads: int = HEADS, keys: int = KEYS) -> tuple[np.ndarray, ...]:
    """Return queries, keys and values in half precision."""
    dtype = jnp.float16
    return (
        ints(BATCH, LENGTH, HEADS, SIZE, dtype=dtype) / dtype(4),
        ints(BATCH, keys, key_heads, SIZE, dtype=dtype) / dtype(4),
        ints(BATCH, keys, key_heads, SIZE, dtype=dtype),
    )


def call(fun: Any, *args: Any, backward: bool = False) -> tuple[Any, list[Any]]:
    """Return the only call of fused attention in a function, and its operands."""
    (equation,) = equations(BACKWARD if backward else FORWARD, fun, args)
    return equation


def test_attention_is_split_by_sequence_head_and_query():
    eqn, _ = call(attend, *arrays())
    query, key, value, *_, output = sharded_dims(eqn, op_factors(eqn))
    assert (query, key, value, output) == ((0, 1, 2), (0, 2), (0, 2), (0, 1, 2))


def test_a_causal_mask_keeps_queries_whole():
    eqn, _ = call(lambda *x: attend(*x, is_causal=True), *arrays())
    assert sharded_dims(eqn, op_factors(eqn))[0] == (0, 2)


def test_the_backward_pass_keeps_queries_whole():
    eqn, _ = call(gradients, *arrays(), backward=True)
    dims = sharded_dims(eqn, op_factors(eqn))
    assert dims[:3] == dims[-3:] == [(0, 2)] * 3
    assert dims[10] == (0, 1)  # the statistics, of (batch, heads, queries)


def test_heads_that_share_keys_stay_together():
    eqn, _ = call(attend, *arrays(key_heads=2))
    factors = op_factors(eqn)
    assert sharded_dims(eqn, factors)[0] == (0, 1, 2)
    two, four = (len(factors.assignments(LogicalMesh((n,), ("x",)))) for n in (2, 4))
    assert (two, four) == (1 + 3, 1 + 2)


LENGTHS = ints(BATCH, low=3, high=LENGTH, dtype=np.int32)
OWN_BIAS = ints(BATCH, HEADS, LENGTH, KEYS, dtype=jnp.float16)
BIAS = ints(1, HEADS, LENGTH, KEYS, dtype=jnp.float16)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (attend, arrays()),
        (lambda *x: attend(*x, is_causal=True), arrays(2)),
        pytest.param(attend, (*arrays(), BIAS), marks=pytest.mark.slow),
        pytest.param(
            lambda *x: attend(*x, query_seq_lengths=LENGTHS), arrays(), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda *x: attend(*x, is_causal=True, local_window_size=2),
            arrays(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "causal, shared keys", "bias", "padding", "window"],
)
def test_shards_of_the_forward_pass_equal_the_whole(fun, args):
    (count,) = check_all([call(fun, *args)], LogicalMesh((2,), ("x",)), 1e-3)
    assert count > 2


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda *x: gradients(*x, is_causal=True), arrays(2)),
        pytest.param(gradients, (*arrays(), OWN_BIAS), marks=pytest.mark.slow),
        pytest.param(gradients, (*arrays(), BIAS), marks=pytest.mark.slow),
    ],
    ids=["causal, shared keys", "bias", "shared bias"],
)
def test_shards_of_the_backward_pass_equal_the_whole(fun, args):
    check_all([call(fun, *args, backward=True)], LogicalMesh((2,), ("x",)), 1e-3)


def test_a_bias_that_sequences_share_keeps_its_gradient_whole():
    eqn, _ = call(gradients, *arrays(), BIAS, backward=True)
    assert not any(sharded_dims(eqn, op_factors(eqn)))


def test_the_kernel_has_the_flop_of_unmasked_pairs():
    eqn, _ = call(lambda *x: attend(*x, is_causal=True), *arrays(keys=LENGTH))
    pairs = BATCH * HEADS * LENGTH * (LENGTH + 1) / 2
    kernel = kernel_of(eqn)
    assert (kernel.kind, kernel.flops, kernel.dtype) == ("attention", 4 * SIZE * pairs, "f16")
    shapes = [(2, *atom.aval.shape[1:]) for atom in (*eqn.invars[:3], *eqn.outvars)]
    part = [*shapes[:3], *(atom.aval.shape for atom in eqn.invars[3:]), *shapes[3:]]
    assert kernel_of(eqn, 0.0, part).flops == kernel.flops / 2


def test_the_kernel_of_the_backward_pass_has_five_products():
    eqn, _ = call(gradients, *arrays(), backward=True)
    kernel = kernel_of(eqn)
    pairs = BATCH * HEADS * LENGTH * KEYS
    assert (kernel.kind, kernel.flops) == ("attention backward", 10 * SIZE * pairs)


@pytest.mark.parametrize(
    ("size", "cluster", "message"),
    [
        (
            128,
            "p3.16xlarge",
            "heads of 128 elements, which needs compute capability 8.0; Tesla V100",
        ),
        (128, "dgx_a100_80", ""),
        (
            256,
            "dgx_a100_80",
            "heads of 256 elements, which needs compute capability 9.0; NVIDIA A100",
        ),
        (256, "dgx_h100", ""),
        (256, "cpu-hosts", ""),
    ],
)
def test_attention_that_a_gpu_lacks_is_refused(size, cluster, message):
    array = jax.ShapeDtypeStruct((1, 8, 1, size), jnp.bfloat16)
    eqns = flatten(jax.make_jaxpr(attend)(array, array, array)).eqns
    device = load_cluster(cluster).pools[0].device
    with pytest.raises(ClusterError, match=message) if message else nullcontext():
        check_capability(eqns, device)


def cudnn_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        q, k, v = (batch @ params[key] for key in "qkv")
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, implementation="cudnn") ** 2)

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads)


CUDNN_ARGUMENTS = (
    {key: jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for key in "qkv"},
    jax.ShapeDtypeStruct((8, 128, 4, 64), jnp.bfloat16),
)


def test_a_step_with_cudnn_compiles_for_a_cluster_with_the_kernels_of_the_planner():
    plan = autopar.plan_step(cudnn_step, CUDNN_ARGUMENTS, cluster="dgx_h100")
    kinds = []
    for fidelity in ("analytic", "compiled"):
        program = autopar.compile_step(
            cudnn_step, CUDNN_ARGUMENTS, plan, "dgx_h100", fidelity=fidelity
        )
        (body,) = program.bodies.values()
        kernels = [op for op in body if isinstance(op, Kernel) and "attention" in op.kind]
        kinds.append([(op.kind, op.flops, op.bytes) for op in kernels])
    pairs = (8 // 8) * 4 * 128 * 128
    assert [flops for _, flops, _ in kinds[1]] == [4 * 64 * pairs, 10 * 64 * pairs]
    assert kinds[0] == kinds[1]


def test_a_step_with_cudnn_is_refused_for_a_gpu_that_lacks_it():
    plan = autopar.plan_step(cudnn_step, CUDNN_ARGUMENTS, cluster="p3.16xlarge")
    with pytest.raises(ClusterError, match=r"test_fused_attention.py.*Use implementation='xla'"):
        autopar.predict(cudnn_step, CUDNN_ARGUMENTS, plan, "p3.16xlarge", fidelity="analytic")


def test_tracing_cudnn_leaves_jax_as_it_was():
    autopar.plan_step(cudnn_step, CUDNN_ARGUMENTS, cluster="dgx_h100")
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.eval_shape(cudnn_step, *CUDNN_ARGUMENTS)


def test_an_inner_block_leaves_cudnn_to_the_outer_one():
    with autopar.assume_cudnn():
        with autopar.assume_cudnn():
            pass
        assert jax.eval_shape(attend, *arrays()).shape == (BATCH, LENGTH, HEADS, SIZE)


def attention_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        queries, keys, values = (
            jnp.einsum("bsd,dhe->bshe", batch["x"], params[k]).astype(jnp.float16) for k in "qkv"
        )
        out = attend(queries, keys, values, is_causal=True)
        out = jnp.einsum("bshe,hed->bsd", out.astype(jnp.float32), params["o"])
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4), num_micro_batches=2),
        *slow(autopar.ShardParallel((2, 4)), autopar.Zero3Parallel(8)),
    ],
    ids=["in microbatches", "sharded", "zero3"],
)
def test_a_step_with_cudnn_equals_one_device(method):
    args = attention_arguments()
    step = autopar.parallelize(attention_step, method=method)
    assert_allclose(step(*args), jax.jit(attention_step)(*args), rtol=1e-2, atol=1e-2)
    plan = step.get_executable(*args).plan
    assert not plan.warnings
    calls = [c for c in plan.stages[0].constraints if c.side == "out" and len(c.shape) == 4]
    assert any(spec for c in calls for spec in c.spec)
