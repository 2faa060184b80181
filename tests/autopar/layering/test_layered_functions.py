"""Decorators cut a loss function into layers, and recompute layers in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.layering.layer_scopes import layer_of

WEIGHTS = [np.full((4, 4), 0.1 * (i + 1), np.float32) for i in range(2)]
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def loss(weights, x):
    for i, weight in enumerate(weights):
        if i:
            autopar.mark_pipeline_boundary()
        x = jnp.sin(x @ weight)
    return jnp.sum(x)


DECORATORS = {
    "manual": autopar.manual_layer_construction,
    "manual, called": autopar.manual_layer_construction(),
    "manual remat": autopar.manual_remat,
    "manual remat, called": autopar.manual_remat(),
    "automatic": autopar.automatic_layer_construction(layer_num=2),
    "automatic remat": autopar.automatic_remat(layer_num=2),
}


def gradient_eqns(decorator):
    """Return the equations of the gradient of the decorated loss."""
    return jax.make_jaxpr(jax.grad(decorator(loss)))(WEIGHTS, X).eqns


@pytest.mark.parametrize("name", DECORATORS)
def test_layers_leave_the_loss_and_its_gradient_as_they_are(name):
    decorated = DECORATORS[name](loss)
    assert np.allclose(jax.jit(decorated)(WEIGHTS, X), loss(WEIGHTS, X), atol=1e-6)
    expected = jax.grad(loss)(WEIGHTS, X)
    for actual, gradient in zip(jax.grad(decorated)(WEIGHTS, X), expected, strict=True):
        assert np.allclose(actual, gradient, atol=1e-6)


@pytest.mark.parametrize("name", DECORATORS)
def test_each_product_belongs_to_its_layer_in_both_passes(name):
    layers = {layer_of(eqn) for eqn in gradient_eqns(DECORATORS[name])} - {None}
    assert {(0, False), (1, False), (0, True), (1, True)} <= layers


@pytest.mark.parametrize("name", DECORATORS)
def test_remat_recomputes_each_layer_in_the_backward_pass(name):
    checkpoints = [eqn for eqn in gradient_eqns(DECORATORS[name]) if "remat" in str(eqn.primitive)]
    assert {layer_of(eqn) for eqn in checkpoints} == (
        {(0, True), (1, True)} if "remat" in name else set()
    )
