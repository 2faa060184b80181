"""Flattening leaves out what no result needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.extend.core.primitives import dot_general_p

import autopar
from autopar.ir.flatten import flatten
from autopar.ir.graph import is_backward, is_forward
from autopar.testing import assert_allclose


def recurrence(x: jax.Array, decay: jax.Array) -> jax.Array:
    """Return x_t + decay * x_(t-1) + ..., whose tree of sums has arrays without elements."""

    def combine(earlier, later):
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    decays = decay * jnp.ones(x.shape)
    return jax.lax.associative_scan(jax.vmap(combine), (decays, x))[1]


@pytest.mark.parametrize("length", [2, 4, 8])
def test_arrays_without_elements_are_not_computed(length: int) -> None:
    x = jnp.arange(2.0 * length).reshape(length, 2)

    def loss(x):
        return jnp.sum(jnp.sin(recurrence(x, jnp.arange(2.0))))

    traced = jax.make_jaxpr(jax.grad(loss))(x)
    flat = flatten(traced)
    assert all(var.aval.size for eqn in flat.eqns for var in eqn.outvars)
    (result,) = jax.jit(jax.extend.core.jaxpr_as_fun(flat))(x)
    np.testing.assert_allclose(result, jax.grad(loss)(x), rtol=1e-6)


def test_a_recurrence_in_a_pipeline_equals_one_device() -> None:
    """XLA:CPU crashes on arrays without elements in the stages, which have two devices each."""

    def step(params, x):
        def loss(params):
            hidden = x
            for weights in params:
                decay = jax.nn.sigmoid(weights[0])
                mixed = jax.vmap(lambda one, w=weights, d=decay: recurrence(one @ w, d))(hidden)
                hidden = hidden + jnp.tanh(mixed) @ weights
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    rng = np.random.default_rng(0)
    params = [0.3 * rng.normal(size=(8, 8)).astype(np.float32) for _ in range(4)]
    x = rng.normal(size=(8, 4, 8)).astype(np.float32)
    method = autopar.PipeshardParallel(
        4, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
    )
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(params, x), jax.jit(step)(params, x), rtol=1e-5)


def test_a_start_of_zero_does_not_read_the_size_of_its_dim():
    """JAX adds the size of a dim to a start that is negative."""

    def at(x, i):
        return jax.lax.fori_loop(0, 3, lambda _, total: total + x[:, i], jnp.zeros(len(x)))

    jaxpr = flatten(jax.make_jaxpr(at)(jnp.ones((16, 4)), 1))
    (lookup,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dynamic_slice")
    start = lookup.invars[1]
    assert isinstance(start, Literal)
    assert start.val == 0


def test_what_two_losses_compute_alike_is_one_equation_behind_stop_gradient():
    """XLA merges it. Its memory was planned as if each loss computed it, and too little was."""

    def step(generator, discriminator, latents):
        def score(discriminator, examples):
            return jnp.mean(jax.nn.softplus(jnp.sin(examples @ discriminator)))

        def generated(generator):
            return jnp.tanh(latents @ generator)

        def discriminator_loss(discriminator):
            return score(discriminator, jax.lax.stop_gradient(generated(generator)))

        def generator_loss(generator):
            return -score(discriminator, generated(generator))

        return jax.grad(generator_loss)(generator), jax.grad(discriminator_loss)(discriminator)

    weights = jnp.ones((4, 4))
    flat = flatten(jax.make_jaxpr(step)(weights, weights, jnp.ones((8, 4))))
    forward = [eqn for eqn in flat.eqns if not is_backward(eqn)]
    assert sum(eqn.primitive is dot_general_p for eqn in forward) == 2


def test_without_recomputation_derivatives_are_computed_where_they_are_read():
    def layer(x, weight):
        return jax.nn.gelu(jax.nn.softmax(jnp.tanh(x @ weight)) @ weight)

    def loss(weights, x):
        for weight in weights:
            x = jax.checkpoint(layer)(x, weight)
        total, _ = jax.lax.scan(lambda total, row: (total + jnp.sum(row**2), None), 0.0, x)
        return total

    weights, x = jax.random.normal(jax.random.key(0), (2, 4, 4)), jnp.ones((3, 4))
    traced = jax.make_jaxpr(jax.grad(loss))(weights, x)
    flat = flatten(traced, keeps_remat=False)
    factors = [
        number for number, eqn in enumerate(flat.eqns) if is_backward(eqn) and is_forward(eqn)
    ]
    assert factors
    for number in factors:
        following = (eqn for eqn in flat.eqns[number + 1 :] if not is_forward(eqn))
        behind = flat.eqns[number + 1 : flat.eqns.index(next(following)) + 1]
        assert any(flat.eqns[number].outvars[0] in eqn.invars for eqn in behind)
    flat = flatten(traced, loops=False, keeps_remat=False)
    (result,) = jax.jit(jax.extend.core.jaxpr_as_fun(flat))(weights, x)
    np.testing.assert_allclose(result, jax.grad(loss)(weights, x), rtol=1e-5)


def test_equal_lookups_with_nan_out_of_range_are_one_equation():
    def looked_up(table, numbers):
        first, second = (jnp.take(table, numbers, axis=0, fill_value=float("nan")) for _ in "ab")
        return first * second

    flat = flatten(jax.make_jaxpr(looked_up)(jnp.ones((4, 2)), jnp.arange(3)))
    assert [eqn.primitive.name for eqn in flat.eqns].count("gather") == 1
