"""Steps that compute with updated weights equal one device, and warn of layers they run late."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.testing import assert_allclose
from tests.autopar.microbatch.batch_losses import BATCH, DEEP, deep
from tests.tiers import fast

METHODS = {
    "shards": autopar.ShardParallel(2, num_micro_batches=4),
    "pipeline": autopar.PipeshardParallel(
        2, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
    ),
}
SEARCHES = {
    "backtracking": optax.chain(
        optax.sgd(8.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=4, store_grad=True),
    ),
    "zoom": optax.lbfgs(memory_size=2),
}


def loss_of(params, batch):
    return jnp.mean((deep(params, batch["x"]) - 0.3) ** 2)


def updated(params, batch):
    value, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def evaluates(params, batch):
    new, value = updated(params, batch)
    return new, value, loss_of(new, batch)


def updates_if_better(params, batch):
    new, value = updated(params, batch)
    better = loss_of(new, batch) < value
    return jax.tree.map(lambda a, b: jnp.where(better, a, b), new, params), value


def equals_one_device(step, method, state):
    """Compare two steps with one device, and return the plan."""
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    expected = state
    for _ in range(2):
        state, *results = parallel(state, BATCH)
        expected, *others = jax.jit(step)(expected, BATCH)
        assert_allclose((state, results), (expected, others), rtol=1e-4, atol=1e-5)
    return parallel.get_last_executable().plan


def of_whole_batch(plan):
    """Return the warnings about layers that run for the whole batch."""
    return [text for text in plan.warnings if "layers of the model run for the whole" in text]


@pytest.mark.parametrize("method", fast(METHODS, ["pipeline"]))
@pytest.mark.parametrize("step", [evaluates, updates_if_better])
def test_layers_with_updated_weights_equal_one_device_and_are_told(step, method):
    plan = equals_one_device(step, METHODS[method], DEEP)
    (warning,) = of_whole_batch(plan)
    assert "batch_losses.py" in warning
    # Two products, each with 8 rows of 6 numbers.
    assert f"{2 * 8 * 6 * 4} bytes" in warning


@pytest.mark.parametrize("method", fast(METHODS, ["pipeline"]))
@pytest.mark.parametrize("name", SEARCHES)
def test_line_searches_along_the_gradient_run_once_after_it(name, method):
    search = SEARCHES[name]

    def step(state, batch):
        params, searched = state

        def loss(params):
            return loss_of(params, batch)

        value, gradients = optax.value_and_grad_from_state(loss)(params, state=searched)
        updates, searched = search.update(
            gradients, searched, params, value=value, grad=gradients, value_fn=loss
        )
        return (optax.apply_updates(params, updates), searched), value

    plan = equals_one_device(step, METHODS[method], (DEEP, search.init(DEEP)))
    assert len(of_whole_batch(plan)) == 1
    assert not any("compute no gradients" in text for text in plan.warnings)


def test_metrics_of_the_weights_before_their_update_are_in_the_microbatches():
    def step(params, batch):
        accuracy = (deep(params, batch["x"]).argmax(-1) == 0).mean()
        return *updated(params, batch), accuracy

    assert not of_whole_batch(equals_one_device(step, METHODS["pipeline"], DEEP))
