"""Losses of microbatches give the result of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.testing import assert_allclose
from tests.autopar.microbatch.batch_losses import (
    BATCH,
    COMPUTED_TWICE,
    FITTING,
    GROUPED,
    OF_THE_WHOLE_BATCH,
    PARAMS,
    REPAIRED,
    RNG,
    SOLVED,
    assert_equals_the_batch,
    clipped,
    masked_mean,
    outputs,
    step_of,
    step_of_all,
)
from tests.tiers import slow


@pytest.mark.parametrize(
    ("losses", "method"),
    [
        (FITTING, autopar.DataParallel(1, 2)),
        (SOLVED, autopar.ShardParallel(1, 4)),
        (REPAIRED, autopar.DataParallel(2, 2)),
        (REPAIRED, autopar.ShardParallel(1, 4)),
        (COMPUTED_TWICE, autopar.ShardParallel(2, 2)),
        (OF_THE_WHOLE_BATCH, autopar.ShardParallel(2, 2)),
        (GROUPED, autopar.DataParallel(1, 2)),
    ],
    ids=[
        "sums and means",
        "solutions",
        "statistics",
        "statistics, 4",
        "computed twice",
        "of the whole batch",
        "neighbours",
    ],
)
def test_losses_over_the_batch_are_exact(losses, method):
    assert_equals_the_batch(step_of_all(losses), method)


@pytest.mark.parametrize("loss", (FITTING | SOLVED).values(), ids=(FITTING | SOLVED).keys())
@pytest.mark.parametrize("count", slow(2, 8))
def test_sums_and_means_over_the_batch_are_exact(loss, count):
    assert_equals_the_batch(step_of(loss), autopar.DataParallel(1, count))


@pytest.mark.parametrize("loss", REPAIRED.values(), ids=REPAIRED.keys())
@pytest.mark.parametrize(
    "method", slow(autopar.DataParallel(2, 2), autopar.ShardParallel(1, 4)), ids=["2", "4"]
)
def test_sums_beside_means_and_statistics_of_the_batch_are_exact(loss, method):
    assert_equals_the_batch(step_of(loss), method)


def test_a_single_example_is_computed_as_several_are():
    def loss(params, batch):
        value = REPAIRED["normalized weights"](params, batch)
        return value if len(batch["mask"]) > 1 else 2 * value

    assert_equals_the_batch(step_of(loss), autopar.ShardParallel(1, num_micro_batches=8))


@pytest.mark.parametrize("loss", slow(*GROUPED.values()), ids=GROUPED.keys())
def test_examples_that_are_put_together_are_neighbours(loss):
    assert_equals_the_batch(step_of(loss), autopar.DataParallel(1, 2))


@pytest.mark.parametrize("count", [2, 4])
def test_a_gradient_by_a_row_that_the_size_of_the_batch_names_is_of_the_whole_batch(count):
    """Nothing else of the loss is left that reads the row, so that its index is that of a pad."""

    def step(table, batch):
        def loss(table):
            return (jnp.sin(batch["x"]) * table[batch["x"].shape[0] - 1]).mean()

        return jax.grad(loss)(table)

    table = RNG.standard_normal((8, 6)).astype(np.float32)
    planned = autopar.parallelize(
        step, method=autopar.ShardParallel(1, num_micro_batches=count), batch_argnums=(1,)
    )
    assert_allclose(planned(table, BATCH), step(table, BATCH), rtol=1e-5, atol=1e-6)


@settings(max_examples=5)
@given(
    rows=st.sampled_from([2, 4, 6, 12]),
    parts=st.sampled_from([2, 3, 6]),
    width=st.integers(1, 4),
    scale=st.floats(-3, 3).filter(lambda s: abs(s) > 1e-2),
    mean=st.booleans(),
)
def test_microbatches_equal_the_batch_for_random_losses(rows, parts, width, scale, mean):
    rows *= parts
    x = np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)

    def loss(p, b):
        z = scale * jnp.sin(b @ p)
        return z.mean() if mean else (z**2).sum()

    p = np.ones((width, 2), np.float32)
    micro = autopar.parallelize(
        step_of(loss), method=autopar.DataParallel(devices=1, num_micro_batches=parts)
    )
    assert_allclose(micro(p, x), step_of(loss)(p, x), rtol=1e-4, atol=1e-4)


def test_a_microbatch_without_weights_does_no_harm():
    """0 / 0 in one of four microbatches, of examples k, k + 4."""
    batch = BATCH | {"mask": np.array([0, 1, 0, 1, 0, 0, 1, 0], np.float32)}
    step = step_of(masked_mean)
    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=4))
    assert_allclose(micro(PARAMS, batch), jax.jit(step)(PARAMS, batch), rtol=1e-5, atol=1e-6)


def test_a_microbatch_computes_as_the_whole_batch_does():
    """Sizes of arrays decide the order of products, as in JAX's derivative of a solution."""

    def loss(params, batch):
        hidden = outputs(params, batch)
        if len(hidden) < 6:
            hidden = hidden @ params["w"].T @ params["w"]
        else:
            hidden = hidden @ (params["w"].T @ params["w"])
        return jnp.tanh(hidden).mean() / len(hidden)

    assert_equals_the_batch(step_of(loss), autopar.ShardParallel(num_micro_batches=4))


def test_loops_over_layers_and_time_keep_what_they_carry():
    """The scan's carry starts as zeros and becomes a row per example; gradients accumulate."""

    def step(w, x):
        def loss(w):
            def cell(state, row):
                total, hidden = state
                hidden = jnp.tanh(hidden @ w + row)
                return (total + (hidden**2).mean(), hidden), None

            hidden = jnp.zeros((x.shape[0], 4))
            (total, _), _ = jax.lax.scan(cell, (0.0, hidden), x.swapaxes(0, 1))
            return total

        value, grad = autopar.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    x = jax.random.normal(jax.random.key(1), (8, 3, 4))
    w = jax.random.normal(jax.random.key(2), (4, 4))
    planned = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=2))
    autopar.testing.assert_allclose(planned(w, x), jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)


def recurrent_loss(params, batch):
    """Clip the gradient of the state of a recurrent network at each step."""

    def cell(state, scale):
        state = jnp.tanh(clipped(state) @ params["w"][:3] + scale * outputs(params, batch))
        return state, None

    state, _ = jax.lax.scan(cell, jnp.zeros((len(batch["x"]), 3)), jnp.arange(1.0, 4.0))
    return ((state - 1) ** 2).mean()


@pytest.mark.parametrize(
    "loss", [lambda p, b: ((clipped(outputs(p, b)) - 1) ** 2).mean(), recurrent_loss]
)
def test_gradients_of_examples_are_clipped_at_their_value_in_the_whole_batch(loss):
    """They are divided by the size of the batch, also those that a loop starts with."""
    step = step_of(loss)
    planned = autopar.parallelize(step, method=autopar.DataParallel(2, 4))
    assert planned.get_executable(PARAMS, BATCH).plan.num_passes == 1
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-5, atol=1e-6)
