"""Flattening leaves out what no result needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.flatten import flatten


def recurrence(x: jax.Array) -> jax.Array:
    """Return x_t + x_(t-1) / 2 + ..., whose tree of sums has arrays without elements."""

    def combine(earlier, later):
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    return jax.lax.associative_scan(combine, (jnp.full_like(x, 0.5), x))[1]


@pytest.mark.parametrize("length", [2, 4, 8])
def test_arrays_without_elements_are_not_computed(length: int) -> None:
    x = jnp.arange(2.0 * length).reshape(length, 2)

    def loss(x):
        return jnp.sum(jnp.sin(recurrence(x)))

    traced = jax.make_jaxpr(jax.grad(loss))(x)
    flat = flatten(traced)
    assert all(var.aval.size for eqn in flat.eqns for var in eqn.outvars)
    (result,) = jax.jit(jax.extend.core.jaxpr_as_fun(flat))(x)
    np.testing.assert_allclose(result, jax.grad(loss)(x), rtol=1e-6)
