"""A scaled trace equals the trace by JAX, except for a single example."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of, fingerprint
from autopar.tracing.rescaled_trace import NotAffineError, rescaled

WEIGHTS = np.ones((6, 4), np.float32)


def loss(weights, x):
    hidden = jnp.tanh(x @ weights * np.arange(4)).reshape(-1, 2)
    total = lax.fori_loop(0, 3, lambda _, value: value + hidden.mean(), 0.0)
    hidden *= np.full((2 * len(x), 1), 1 / len(x), np.float32)
    noise = jax.random.normal(jax.random.key(0), (2 * len(x), 2))
    return (hidden * noise).mean() + total / len(x) + len(x)


def traced(fun, rows):
    return flatten(jax.make_jaxpr(fun)(WEIGHTS, jax.ShapeDtypeStruct((rows, 6), np.float32)))


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_it_is_the_trace_for_the_size(rows):
    step = jax.value_and_grad(loss)
    scaled = rescaled(traced(step, 4), traced(step, 12), Fraction(3), Fraction(rows, 4))
    assert fingerprint(scaled) == fingerprint(traced(step, rows))
    assert len(scaled.consts) == 2
    assert aval_of(scaled.invars[1]).shape == (rows, 6)


def test_the_trace_for_a_single_example_keeps_its_dims():
    step = jax.value_and_grad(loss)
    scaled = rescaled(traced(step, 2), traced(step, 6), Fraction(3), Fraction(1, 2))
    larger = traced(step, 2)
    assert [eqn.primitive for eqn in scaled.eqns] == [eqn.primitive for eqn in larger.eqns]
    assert aval_of(scaled.invars[1]).shape == (1, 6)
    x = np.ones((1, 6), np.float32)
    env = dict(zip(scaled.constvars, scaled.consts, strict=True))
    env.update(zip(scaled.invars, (WEIGHTS, x), strict=True))
    evaluate(enumerate(scaled.eqns), env, before=unchanged, after=unchanged)
    np.testing.assert_allclose(env[scaled.outvars[0]], loss(WEIGHTS, x), rtol=1e-6)


def test_sizes_of_groups_that_are_larger_than_the_batch_are_rounded_up():
    def fun(_, x):
        groups = x.reshape(-1, 4, 6)
        return (groups - groups.mean(1, keepdims=True)).reshape(x.shape) * 3

    sizes = traced(fun, 8), traced(fun, 16), Fraction(2), Fraction(1, 4)
    with pytest.raises(NotAffineError):
        rescaled(*sizes)
    scaled = rescaled(*sizes, rounds=True)
    shapes = [aval_of(eqn.outvars[0]).shape for eqn in scaled.eqns]
    assert shapes[0] == (1, 4, 6)
    assert shapes[-2:] == [(2, 6)] * 2
    assert scaled.eqns[-1].invars[1].val == 3


def test_other_numbers_stay():
    def fun(_, x):
        return x * np.sqrt(len(x))

    scaled = rescaled(traced(fun, 4), traced(fun, 12), Fraction(3), Fraction(1, 2))
    (product,) = scaled.eqns
    assert aval_of(product.outvars[0]).shape == (2, 6)
    assert product.invars[1].val == 2


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: x[: len(x) - 1],
        lambda w, x: jnp.arange(len(x) + 2) * x[0, 0],
        lambda w, x: x[-1:] * jnp.pad(x, ((0, 3), (0, 0)))[0] + len(x) - 7,
    ],
    ids=["limit", "shape", "end"],
)
def test_sizes_may_be_affine_functions_of_the_batch_size(fun):
    scaled = rescaled(traced(fun, 4), traced(fun, 12), Fraction(3), Fraction(1, 2))
    assert fingerprint(scaled) == fingerprint(traced(fun, 2))


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sin(x) if len(x) == 4 else jnp.cos(x),
        lambda w, x: jnp.arange((len(x) + 2) // 3) * x[0, 0],
        lambda w, x: x[: len(x) - 3],
        lambda w, x: x * np.linspace(0, 1, len(x))[:, None],
        lambda w, x: jnp.sin(x) + (x if len(x) == 4 else jnp.sin(x)),
        lambda w, x: jnp.argsort(x[:, 0], descending=len(x) == 4),
    ],
    ids=["primitive", "shape", "negative", "constant", "operand", "flag"],
)
def test_other_sizes_are_refused(fun):
    with pytest.raises(NotAffineError):
        rescaled(traced(fun, 4), traced(fun, 12), Fraction(3), Fraction(1, 2))
