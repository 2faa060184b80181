"""Equations that XLA's partitioner gets wrong run shardwise, with the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.primitives import runs_on_shards
from autopar.sharding.options import ShardingOptions
from autopar.testing import assert_allclose
from tests.autopar.sharding.equation_cases import CASES
from tests.autopar.sharding.shard_by_shard import equations
from tests.autopar.sharding.split_by_xla import wrong_splits
from tests.autopar.sharding.test_rules import pointwise_case
from tests.tiers import fast, pairs, slow

RNG = np.random.default_rng(0)
NUMBERS = ("NHWC", "HWIO", "NHWC")
KERNEL = RNG.standard_normal((3, 3, 4, 8)).astype(np.float32)
IMAGES = RNG.standard_normal((16, 8, 6, 4)).astype(np.float32)


def conv(x, w, groups=1):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NUMBERS, feature_group_count=groups
    )


def per_example_gradients(w, x):
    """Compute gradients for each example: a convolution with as many groups as examples."""
    return jax.vmap(jax.grad(lambda w, x: jnp.sum(conv(x[None], w) ** 2)), (None, 0))(w, x)


def clipped_step(w, x, value_and_grad):
    """Run a step of DP-SGD, which clips the gradient of each example."""

    def loss(w):
        return jnp.mean(jnp.tanh(conv(x, w)) ** 2)

    value, _ = value_and_grad(loss)(w)
    gradients = per_example_gradients(w, x)
    norms = jnp.sqrt(jnp.sum(gradients**2, axis=(1, 2, 3, 4), keepdims=True))
    return w - 0.1 * jnp.mean(gradients / jnp.maximum(norms, 1.0), 0), value


METHODS = {
    "data": autopar.DataParallel(8),
    "zero2": autopar.Zero2Parallel(8),
    "zero3": autopar.Zero3Parallel(8),
    "automatic": autopar.ShardParallel(8),
    "automatic, two axes": autopar.ShardParallel((2, 4)),
    "batch on one of two axes": autopar.ShardParallel(
        (2, 4), options=ShardingOptions(batch_axis="x")
    ),
    "heuristic": autopar.ShardParallel((2, 4), options=ShardingOptions(mode="heuristic")),
    "manual": autopar.ManualShardParallel((2, 4), in_specs=(P(), P("x"))),
    "manual, space": autopar.ManualShardParallel(
        (2, 4), in_specs=(P(None, None, None, "y"), P("x", "y"))
    ),
}


@pytest.mark.parametrize("method", fast(METHODS, ["zero3", "automatic, two axes", "manual, space"]))
def test_per_example_gradients_of_a_convolution_are_those_of_one_device(method):
    planned = autopar.parallelize(per_example_gradients, method=METHODS[method])
    assert_allclose(
        planned(KERNEL, IMAGES), per_example_gradients(KERNEL, IMAGES), rtol=1e-4, atol=1e-4
    )


def test_a_plan_divides_the_examples_of_per_example_gradients():
    planned = autopar.parallelize(per_example_gradients, method=autopar.DataParallel(8))
    executable = planned.get_executable(KERNEL, IMAGES)
    divided = {
        c.shape
        for c in executable.plan.stages[0].constraints
        if c.spec[-1] == ("x",) and c.side == "out"
    }
    cotangents, kernels = (1, 8, 6, 16 * 8), (3, 3, 4, 16 * 8)  # of all examples
    assert divided == {cotangents, kernels}
    assert "f32[3,3,4,16]" in executable.get_hlo_text("partitioned")
    again = autopar.parallelize(per_example_gradients, method=autopar.PlanMethod(executable.plan))
    assert_allclose(again(KERNEL, IMAGES), planned(KERNEL, IMAGES))


@pytest.mark.parametrize("method", fast(METHODS, ["data", "batch on one of two axes", "manual"]))
def test_a_step_with_clipped_gradients_is_that_of_one_device(method):
    step = lambda w, x: clipped_step(w, x, jax.value_and_grad)  # noqa: E731
    planned = autopar.parallelize(step, method=METHODS[method])
    assert_allclose(planned(KERNEL, IMAGES), step(KERNEL, IMAGES), rtol=1e-4, atol=1e-4)


GROUPED = RNG.standard_normal((3, 3, 2, 8)).astype(np.float32)
SPLITS = {
    "examples": {"0": P(), "1/*": P("y")},
    "examples on both": {"0": P(), "1/*": P(("x", "y"))},
    "features": {"0": P(None, None, None, "x"), "1/*": P()},
    "features and examples": {"0": P(None, None, None, "x"), "1/*": P("y")},
}


def grouped_step(w, batch, value_and_grad=jax.value_and_grad):
    def loss(w):
        return jnp.mean((jnp.tanh(conv(batch["x"], w, groups=2)) - batch["y"]) ** 2)

    value, gradient = value_and_grad(loss)(w)
    return w - gradient, value


def grouped_batch():
    return {"x": IMAGES, "y": RNG.standard_normal((16, 8, 6, 8)).astype(np.float32)}


@pytest.mark.parametrize(("split", "count"), pairs(list(SPLITS), [1, 2]))
def test_gradients_of_grouped_convolutions_are_those_of_one_device(split, count):
    """With microbatches autopar may split examples while XLA splits features."""
    step, batch = lambda w, b: grouped_step(w, b, autopar.value_and_grad), grouped_batch()
    options = ShardingOptions(pins=SPLITS[split])
    method = autopar.ShardParallel((2, 4), num_micro_batches=count, options=options)
    planned = autopar.parallelize(step, method=method)
    assert_allclose(planned(GROUPED, batch), grouped_step(GROUPED, batch), rtol=1e-4, atol=1e-5)


def test_grouped_convolutions_in_a_loop_are_those_of_one_device():
    def step(w, x):
        def body(x, _):
            return jnp.tanh(conv(x, w, groups=4)), None

        loss = lambda w: jnp.mean(jax.lax.scan(body, x, length=3)[0] ** 2)  # noqa: E731
        return jax.value_and_grad(loss)(w)

    w = RNG.standard_normal((3, 3, 1, 4)).astype(np.float32)
    planned = autopar.parallelize(step, method=autopar.ShardParallel((2, 4)))
    assert_allclose(planned(w, IMAGES), step(w, IMAGES), rtol=1e-4, atol=1e-5)


def test_grouped_convolutions_in_a_pipeline_are_those_of_one_device():
    def step(w, batch, value_and_grad=autopar.value_and_grad):
        def loss(w):
            hidden = jnp.tanh(conv(batch["x"], w["a"], groups=2))
            autopar.mark_pipeline_boundary()
            return jnp.mean((conv(hidden, w["b"], groups=8) - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - g, w, gradients), value

    w, batch = (
        {"a": GROUPED, "b": RNG.standard_normal((3, 3, 1, 8)).astype(np.float32)},
        grouped_batch(),
    )
    stages = autopar.ManualStageOption([[0], [1]], [(1, 4)] * 2, [(2, 2)] * 2, [{}] * 2)
    layers = autopar.ManualLayerOption()
    method = autopar.PipeshardParallel(
        8, num_micro_batches=2, layer_option=layers, stage_option=stages
    )
    planned = autopar.parallelize(step, method=method)
    assert_allclose(planned(w, batch), step(w, batch, jax.value_and_grad), rtol=1e-4, atol=1e-5)


def test_a_state_made_by_a_grouped_convolution_is_that_of_one_device():
    def make(x):
        return per_example_gradients(KERNEL, x)

    def step(state, x):
        return jnp.tanh(state) * jnp.mean(x)

    options = ShardingOptions(pins={"0": P("x")})
    train_step = autopar.parallelize(step, method=autopar.ShardParallel(8, options=options))
    create = autopar.parallelize(make, method=autopar.CreateStateParallel(train_step, [IMAGES]))
    assert_allclose(create(IMAGES), make(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("label", [*slow("gradient of kernel, groups", "batch groups"), "groups"])
def test_every_split_of_a_convolution_with_groups_is_right(label):
    """`tests/fuzz/test_splits.py` tests the other primitives."""
    label, mesh = f"conv_general_dilated: {label}", LogicalMesh((2, 4), ("x", "y"))
    fun, args = CASES[label](lambda: 4)
    ((eqn, operands),) = [
        equation
        for equation in equations("conv_general_dilated", fun, args)
        if runs_on_shards(equation[0])
    ]
    splits = list(wrong_splits(eqn, operands, mesh))
    assert len(splits) > 1
    assert not [(option, wrong) for option, wrong in splits if wrong]


SPLIT = {
    "fft: real": "fft",
    "top_k": "top_k",
    "triangular_solve: right-hand sides": "triangular_solve",
    "igamma": "igamma",
}
"""Cases of primitives that XLA's partitioner would gather, or test in a loop on all devices."""


@pytest.mark.parametrize("label", SPLIT)
def test_splits_of_what_xla_would_gather_have_no_collectives(label):
    if label in CASES:
        fun, args = CASES[label](lambda: 8)
    else:
        fun, args = pointwise_case(label, 8)
    ((eqn, operands),) = equations(SPLIT[label], fun, args)
    splits = list(wrong_splits(eqn, operands, LogicalMesh((2, 4), ("x", "y"))))
    assert len(splits) > 1
    assert not [(option, wrong) for option, wrong in splits if wrong]


def test_a_stage_with_fourier_transforms_is_that_of_one_device():
    """XLA:CPU refused a gathered array of another layout in a Fourier transform (jaxlib 0.11.2)."""

    def mixed(x, kernel):
        transform = lambda a: jnp.fft.rfft(jnp.pad(a, (0, len(a))))  # noqa: E731
        return jnp.fft.irfft(transform(x) * transform(kernel))[: len(x)]

    def step(params, batch):
        def loss(params):
            hidden = batch["x"]
            for layer in params:
                over_features = jax.vmap(jax.vmap(mixed, (1, 1), 1), (0, None))
                hidden = hidden + jnp.tanh(over_features(hidden, layer["kernel"]) @ layer["out"])
            return jnp.mean((hidden.mean((1, 2)) - batch["y"]) ** 2)

        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    shapes = {"kernel": (16, 8), "out": (8, 8)}
    params = [
        {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(4)
    ]
    batch = {
        "x": RNG.standard_normal((16, 16, 8)).astype(np.float32),
        "y": RNG.standard_normal(16).astype(np.float32),
    }
    method = autopar.PipeshardParallel(8, 4, layer_option=autopar.AutoLayerOption(2))
    planned = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(planned(params, batch), jax.jit(step)(params, batch), rtol=1e-4, atol=1e-5)
