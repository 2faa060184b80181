"""Microbatches are computed again where a loss or a gradient needs one of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from tests.autopar.microbatch.batch_losses import (
    BATCH,
    COMPUTED_TWICE,
    DEEP,
    OF_THE_WHOLE_BATCH,
    PARAMS,
    assert_equals_the_batch,
    deep,
    normalized,
    outputs,
    per_example,
    step_of,
)
from tests.tiers import slow


def sharpness_aware_step_of(norm_of):
    def step(params, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["x"] @ params["in"])
            return ((hidden @ params["out"] - batch["y"]) ** 2).mean()

        grads = jax.grad(loss_fn)(params)
        norm = norm_of(params, grads)
        ascended = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        grads = jax.grad(loss_fn)(ascended)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


sharpness_aware_step = sharpness_aware_step_of(lambda params, grads: optax.tree.norm(grads))


def sharpness_aware_arguments():
    rng = np.random.default_rng(0)
    shapes = {"in": (4, 8), "out": (8, 2), "x": (8, 4), "y": (8, 2)}
    values = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    return {k: values[k] for k in ("in", "out")}, {k: values[k] for k in ("x", "y")}


COMPLETED = COMPUTED_TWICE | OF_THE_WHOLE_BATCH


def test_a_sharpness_aware_step_may_have_contrastive_losses():
    def loss(params, batch):
        rows = outputs(params, batch)
        return -jnp.diag(jax.nn.log_softmax(rows @ jnp.tanh(rows).T)).mean()

    def step(params, batch):
        first = jax.grad(loss)(params, batch)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(first), params, first)
        return jax.value_and_grad(loss)(moved, batch)

    assert_equals_the_batch(step, autopar.ShardParallel(2, num_micro_batches=4))


@pytest.mark.parametrize("loss", COMPLETED.values(), ids=COMPLETED.keys())
@pytest.mark.parametrize(
    "method",
    slow(
        autopar.ShardParallel(1, 4),
        autopar.PipeshardParallel(
            4, 2, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
        ),
    ),
    ids=["4 microbatches", "pipeline"],
)
def test_losses_that_need_two_passes_are_exact(loss, method):
    def step(params, batch):
        return step_of(lambda p, b: loss(p, b | {"x": deep(p["deep"], b["x"])}))(params, batch)

    params = PARAMS | {"deep": DEEP}
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(params, BATCH), jax.jit(step)(params, BATCH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel(2, num_micro_batches=2),
        autopar.PipeshardParallel(
            2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
        ),
    ],
    ids=["shards", "pipeline"],
)
def test_a_second_gradient_of_the_batch_follows_the_first_in_a_second_pass(method):
    """Sharpness-aware steps move the parameters by the first gradient of the whole batch."""
    step = autopar.parallelize(sharpness_aware_step, method=method)
    expected = sharpness_aware_step(*sharpness_aware_arguments())
    autopar.testing.assert_allclose(step(*sharpness_aware_arguments()), expected, rtol=1e-4)
    executable = step.get_last_executable()
    assert executable is not None
    assert "2 passes over the microbatches compute the model" in executable.plan.warnings[-1]
    assert executable.first_pass is not None
    assert executable.step.first_pass.has_backward


@pytest.mark.parametrize(
    "norm_of",
    [
        lambda params, grads: jnp.abs(grads["in"]).max(),
        lambda params, grads: jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))),
        lambda params, grads: optax.tree.norm(jax.tree.map(jnp.multiply, params, grads)),
    ],
    ids=["of some gradients", "by dot products", "of scaled gradients"],
)
def test_a_second_gradient_may_follow_from_a_norm_of_the_first_in_any_way(norm_of):
    """All first gradients are completed, though the norm reads some of them, or functions."""
    step = sharpness_aware_step_of(norm_of)
    parallel = autopar.parallelize(
        step, method=autopar.ShardParallel(2, num_micro_batches=2), donate_argnums=()
    )
    args = sharpness_aware_arguments()
    autopar.testing.assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4)


def test_a_pipeline_of_one_microbatch_takes_a_second_gradient_of_the_batch():
    method = autopar.PipeshardParallel(
        2, num_micro_batches=1, layer_option=autopar.AutoLayerOption(2)
    )
    step = autopar.parallelize(sharpness_aware_step, method=method)
    expected = sharpness_aware_step(*sharpness_aware_arguments())
    autopar.testing.assert_allclose(step(*sharpness_aware_arguments()), expected, rtol=1e-4)


def test_statistics_that_divide_a_loss_are_accumulated_in_loops_before_it():
    """Weights are normalized by mean, then by deviation; only the last loop runs the model."""

    def step(params, batch):
        return autopar.grad(lambda p: (per_example(p, batch) * normalized(batch["mask"])).mean())(
            params
        )

    found = trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2).microbatching
    products = [
        sum(eqn.primitive.name == "dot_general" for _, eqn in loop.body) for loop in found.loops
    ]
    assert len(products) == 3
    assert products[:2] == [0, 0]
    assert products[2] > 0


def test_a_branch_on_the_batch_is_taken_alike_in_all_microbatches():
    """A first pass completes the condition, here a sum that a part of the batch has otherwise."""

    def step(w, x):
        def loss(w):
            return jax.lax.cond(
                x.sum() > 0, lambda: jnp.tanh(x @ w).mean(), lambda: jnp.sin(x @ w).sum()
            )

        return autopar.grad(loss)(w)

    x = jnp.where(jnp.arange(8)[:, None] % 2 == 0, -1.0, 2.0) * jnp.ones((8, 4))
    w = jax.random.normal(jax.random.key(2), (4, 4))
    for sign in (1, -1):
        method = autopar.DataParallel(devices=2, num_micro_batches=2)
        planned = autopar.parallelize(step, method=method, donate_argnums=())
        assert_allclose(planned(w, sign * x), jax.jit(step)(w, sign * x), rtol=1e-5, atol=1e-6)
