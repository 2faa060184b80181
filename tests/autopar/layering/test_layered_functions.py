"""Decorators cut a loss function into layers, and recompute layers in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import equal_blocks
from autopar.layering.layer_scopes import layer_of
from autopar.layering.layered_functions import layered
from autopar.testing import assert_allclose

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


def blocks_loss(weights, x):
    """Equal blocks of three products each, then a head."""
    *blocks, head = weights
    for block in blocks:
        for weight in block:
            x = x + jnp.sin(x @ weight)
    return jnp.mean((x @ head) ** 2)


BLOCKS = [[np.full((4, 4), 0.1 * (i + k), np.float32) for k in range(3)] for i in range(4)]
BLOCK_WEIGHTS = [*BLOCKS, np.ones((4, 1), np.float32)]


def recomputed_layers(**options):
    """Return the layer of each recomputed part, in the order of the forward pass."""
    decorated = autopar.automatic_layer_construction(layer_num=2, remat_layer=True, **options)(
        blocks_loss
    )
    expected = jax.grad(blocks_loss)(BLOCK_WEIGHTS, X)
    gradients = jax.grad(decorated)(BLOCK_WEIGHTS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), gradients, expected)
    eqns = jax.make_jaxpr(jax.grad(decorated))(BLOCK_WEIGHTS, X).eqns
    parts = [layer_of(eqn) for eqn in eqns if "remat" in str(eqn.primitive)]
    assert all(is_backward for _, is_backward in parts)
    return [layer for layer, _ in parts][::-1]


@pytest.mark.parametrize(
    ("remat_parts", "layers"),
    [(None, [0, 1]), (1, [0, 1]), (4, [0, 0, 1, 1]), ("auto", [0, 0, 1, 1, 1])],
)
def test_layers_are_recomputed_in_parts(remat_parts, layers):
    assert recomputed_layers(remat_parts=remat_parts) == layers


def test_parts_end_with_their_layers():
    assert recomputed_layers(remat_parts=3) == [0, 0, 1, 1]


def test_more_parts_than_products_are_refused():
    with pytest.raises(NoLayersError, match=r"remat_parts is 200: 200 layers asked of"):
        recomputed_layers(remat_parts=200)


@pytest.mark.parametrize("remat_parts", [4, "auto"])
def test_a_scan_over_layers_is_recomputed_in_parts(remat_parts):
    def scanned(stack, x):
        def body(y, weight):
            return jnp.sin(y @ weight), None

        return jnp.mean(jax.lax.scan(body, x, stack)[0] ** 2)

    stack = np.stack([np.full((4, 4), 0.1 * (i + 1), np.float32) for i in range(4)])
    option = autopar.AutoLayerOption(2, remat_layer=True, remat_parts=remat_parts)
    decorated = layered(scanned, option)
    np.testing.assert_allclose(
        jax.grad(decorated)(stack, X), jax.grad(scanned)(stack, X), rtol=1e-5
    )
    eqns = jax.make_jaxpr(jax.grad(decorated))(stack, X).eqns
    assert [layer_of(eqn)[0] for eqn in eqns if "remat" in str(eqn.primitive)] == [1, 1, 0, 0]


def test_equal_blocks_are_the_periods_of_heavy_equations():
    block = [4.0, 0.0, 1.0, 2.0]
    blocks = equal_blocks(np.array([9.0, *block * 5, 0.0, 7.0]))
    assert blocks.tolist() == [[1 + 4 * i, 3 + 4 * i, 4 + 4 * i] for i in range(5)]
    assert equal_blocks(np.array(block * 5)).shape == (5, 3)
    assert equal_blocks(np.ones(12)).shape == (4, 3)
    assert equal_blocks(np.ones(12), shortest=1).shape == (12, 1)


@pytest.mark.parametrize("flops", [[], [1.0], [0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])
def test_functions_without_equal_blocks_have_none(flops):
    assert equal_blocks(np.array(flops)).size == 0


@pytest.mark.parametrize("remat_layer", [False, True])
def test_a_gradient_inside_of_the_loss_is_a_part_of_its_layers(remat_layer):
    """The penalty of invariant risk minimization: the gradient with respect to a scale of one."""

    def step(weights, x):
        def penalized(weights):
            outputs = jnp.tanh(x @ weights[0]) @ weights[1]

            def risk(scale):
                return jnp.mean((scale * outputs - x) ** 2)

            return risk(1.0) + autopar.grad(risk)(1.0) ** 2

        value, gradients = autopar.value_and_grad(penalized)(weights)
        return jax.tree.map(lambda weight, g: weight - 0.1 * g, weights, gradients), value

    layers = autopar.AutoLayerOption(2, remat_layer=remat_layer)
    method = autopar.PipeshardParallel(devices=2, num_micro_batches=2, layer_option=layers)
    planned = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(planned(WEIGHTS, X), jax.jit(step)(WEIGHTS, X), rtol=1e-5, atol=1e-6)
