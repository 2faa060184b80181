"""Values that a step computes beside its loss and gradient equal the whole batch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.testing import assert_allclose
from tests.autopar.microbatch.batch_losses import (
    BATCH,
    DEEP,
    PARAMS,
    deep,
    mean_loss,
    per_example,
    preferences,
)
from tests.tiers import fast


def test_rows_of_a_single_example_get_the_dim_that_jax_leaves_out():
    """`take_along_axis` drops dims of size one, here from indices that are read after the loss."""

    def step(weights, batch):
        def loss_fn(weights):
            scores = batch["x"] @ weights
            order = jnp.argsort(batch["tokens"], 1)
            sorted_scores = jnp.take_along_axis(scores, order, 1)
            relative = jnp.take_along_axis(scores / jnp.abs(scores).max(), order, 1)
            return (sorted_scores * jnp.arange(3)).mean(), relative

        (_, relative), gradient = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        return weights - gradient, relative

    batch = {
        "x": np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5) ** 3,
        "tokens": np.array([[3, 1, 2], [0, 5, 4], [7, 7, 1], [2, 9, 0]]),
    }
    weights = np.linspace(-1, 2, 15, dtype=np.float32).reshape(5, 3)
    method = autopar.ShardParallel(1, num_micro_batches=4)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(weights, batch), jax.jit(step)(weights, batch), rtol=1e-5, atol=1e-6)


def test_several_masked_means_are_accumulated_each_with_its_weights():
    """In one loss function, as auxiliary values, and in two."""

    def step(params, batch):
        def loss(p, mask):
            total = (per_example(p, batch) * mask).sum()
            return total / mask.sum(), {
                "tokens": mask.sum(),
                "share": total / (2 * batch["mask"] + 1).sum(),
            }

        one = autopar.value_and_grad(loss, has_aux=True)(params, batch["mask"])
        two = autopar.value_and_grad(loss, has_aux=True)(params, 1 + batch["mask"])
        return one, two

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=4))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 2), num_micro_batches=2),
    "data parallel": autopar.DataParallel(devices=2, num_micro_batches=2),
    "ZeRO": autopar.Zero3Parallel(devices=2, num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(
        devices=2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)
    ),
}
over_methods = pytest.mark.parametrize(
    "method", fast(METHODS.values(), [METHODS["shards"], METHODS["pipeline"]]), ids=METHODS.keys()
)


@over_methods
def test_the_size_of_the_batch_is_that_of_the_whole_batch_outside_of_the_loss(method):
    """As a number, an array, a shape, and as auxiliary values of both kinds."""

    def step(params, batch, seen):
        def loss(p):
            return (deep(p, batch["x"]) ** 2).sum(), (
                jnp.float32(batch["x"].shape[0]),
                len(batch["x"]),
            )

        (total, (examples, number)), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g / batch["x"].shape[0], params, gradients)
        positions = jnp.arange(number) + len(batch["y"])
        return updated, total / examples, seen + batch["x"].shape[0], positions

    args = DEEP, BATCH, jnp.int32(3)
    assert_allclose(
        autopar.parallelize(step, method=method)(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5
    )


@over_methods
def test_what_rounds_to_integers_is_rounded_once(method):
    """Quotients of the microbatches' integers do not sum to the batch's."""

    def step(params, batch):
        def loss(p):
            rows = (batch["x"] * 0 + 5).astype(jnp.int32)
            return (deep(p, batch["x"]) ** 2).mean(), jax.lax.div(rows.sum(), 7)

        (value, seventh), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, seventh

    trained = autopar.parallelize(step, method=method)
    assert_allclose(trained(DEEP, BATCH), jax.jit(step)(DEEP, BATCH), rtol=1e-5, atol=1e-5)


@over_methods
def test_neighbouring_examples_stay_together(method):
    def step(params, batch):
        def loss(p):
            return preferences(deep(p, batch["x"]).sum(1), 2), deep(p, batch["x"]).sum()

        (value, total), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, total

    assert_allclose(
        autopar.parallelize(step, method=method)(DEEP, BATCH),
        jax.jit(step)(DEEP, BATCH),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rows_come_back_in_order_from_an_evaluation_that_groups_neighbours():
    def train(params, batch):
        value, gradients = autopar.value_and_grad(lambda p: (deep(p, batch["x"]) ** 2).mean())(
            params
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def evaluate(params, batch):
        scores = deep(params, batch["x"])
        return (
            scores,
            scores.sum(1).reshape(-1, 2).max(1),
            scores.reshape(-1),
            jnp.arange(len(scores)),
            len(scores),
        )

    trained = autopar.parallelize(train, method=METHODS["pipeline"])
    trained(DEEP, BATCH)
    evaluated = autopar.parallelize(
        evaluate, method=autopar.FollowParallel(trained, num_micro_batches=2)
    )
    assert_allclose(evaluated(DEEP, BATCH), jax.jit(evaluate)(DEEP, BATCH), rtol=1e-5, atol=1e-5)


@over_methods
def test_what_is_printed_in_a_loss_is_printed_per_microbatch_and_after_it_once(method, capfd):
    def step(params, batch):
        def loss(p):
            hidden = deep(p, batch["x"])
            jax.debug.print("inside {}", hidden.shape[0])
            jax.debug.print("sum {}", hidden.sum())
            return (hidden**2).mean()

        value, gradients = autopar.value_and_grad(loss)(params)
        jax.debug.print("after {}", value)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    planned = autopar.parallelize(step, method=method)
    value = jax.block_until_ready(planned(DEEP, BATCH))[1]
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.startswith("sum") for line in lines) >= 2
    assert [float(line.split()[1]) for line in lines if line.startswith("after")] == [
        pytest.approx(float(value))
    ]
    assert_allclose((value,), jax.jit(step)(DEEP, BATCH)[1:], rtol=1e-5)


def test_auxiliary_values_are_put_together():
    def step(params, batch):
        def loss(p):
            each = per_example(p, batch)
            return each.mean(), {
                "count": batch["mask"].sum(),
                "mean": each.mean(),
                "fixed": jnp.int32(3),
            }

        (value, aux), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return gradients, value, aux

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=1, num_micro_batches=4))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def test_grad_alone_accumulates():
    def step(params, batch):
        return autopar.grad(lambda p: mean_loss(p, batch))(params)

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=1, num_micro_batches=2))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def test_outside_parallelize_they_are_jaxs_own():
    value, gradients = autopar.value_and_grad(mean_loss)(PARAMS, BATCH)
    assert_allclose((value, gradients), jax.value_and_grad(mean_loss)(PARAMS, BATCH))
    assert_allclose(jax.jit(autopar.grad(mean_loss))(PARAMS, BATCH), gradients)
