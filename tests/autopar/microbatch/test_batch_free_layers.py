"""Layers that depend on no example are computed once per step, and equal one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.testing import assert_allclose

RANDOM = np.random.default_rng(0)
METHODS = {
    "shards": autopar.ShardParallel((2, 2), 4),
    "ZeRO-3": autopar.Zero3Parallel(4, 4),
    "pipeline": autopar.PipeshardParallel(4, 4, layer_option=autopar.AutoLayerOption(2)),
}


def normal(*shape):
    return (RANDOM.standard_normal(shape) / 3).astype(np.float32)


def tower(layers, x):
    for weights in layers:
        x = jnp.tanh(x @ weights)
    return x


def scores(params, batch):
    """Return the scores of all items for the user of each example."""
    items = tower(params["items"], params["catalog"])
    return tower(params["users"], batch["x"]) @ items.T


def cross_entropy(params, batch):
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores(params, batch)), batch["y"], 1)
    return losses.mean()


def masked(params, batch):
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores(params, batch)), batch["y"], 1)
    return (losses[:, 0] * batch["mask"]).sum() / batch["mask"].sum()


def looped(params, batch):
    """Compute the items by a loop over their layers."""
    layers = jnp.stack(params["items"])
    items, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["catalog"], layers)
    rows = tower(params["users"], batch["x"])
    return ((rows @ items.T) ** 2).sum() + (items**2).mean()


def orthogonal(params, batch):
    """Add a regularizer of the weights to the loss of the examples."""
    penalties = (((w.T @ w - jnp.eye(8)) ** 2).sum() for w in params["users"])
    return (tower(params["users"], batch["x"]) ** 2).mean() + 0.1 * sum(penalties)


LOSSES = [cross_entropy, masked, looped, orthogonal]
PARAMS = {
    "catalog": normal(16, 8),
    "items": [normal(8, 8) for _ in range(2)],
    "users": [normal(8, 8) for _ in range(3)],
}
BATCH = {
    "x": normal(16, 8),
    "y": RANDOM.integers(0, 16, (16, 1)),
    "mask": RANDOM.integers(0, 2, 16).astype(np.float32),
}


def step_of(loss):
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def executed(step, method, *args):
    """Return the executable of a step that has been seen to equal one device."""
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4, atol=1e-5)
    return parallel.get_last_executable()


def num_products(eqns):
    return sum(eqn.primitive.name == "dot_general" for eqn in eqns)


def products_of(step):
    """Return the number of products in each microbatch, and of those that are computed once."""
    first = products_of(step.first_pass.step) if step.first_pass else (0, 0)
    micro = step.microbatching
    parts = (num_products(eqn for _, eqn in part) for part in (micro.body, micro.tail))
    return tuple(sum(pair) for pair in zip(first, parts, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES)
def test_layers_without_examples_equal_one_device(loss, method):
    executed(step_of(loss), METHODS[method], PARAMS, BATCH)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pipeline_computes_layers_without_examples_once(loss):
    step = step_of(loss)
    graph = executed(step, METHODS["pipeline"], PARAMS, BATCH).step
    each, once = products_of(graph)
    users = 3 * 3 - 1  # the examples have no gradient
    assert each == users + (0 if loss is orthogonal else 3)
    written = autopar.tracing.trace.trace(step, (PARAMS, BATCH), (1,)).jaxpr
    assert each + once == num_products(written.eqns)
