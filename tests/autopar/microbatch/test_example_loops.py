"""Loops of Equinox run in microbatches where every example that is done keeps its values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.testing import assert_allclose

WEIGHTS = 0.4 * np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
BATCH *= np.logspace(-4, 1, 8, dtype=np.float32)[:, None]  # examples take 1 to 11 iterations
METHODS = {
    "microbatches": autopar.ShardParallel((2, 4), num_micro_batches=4),
    "pipeline": autopar.PipeshardParallel(
        8, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
    ),
}


def marker(name, function):
    """Return a primitive of Equinox, which the tests do without."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: function(x))
    primitive.def_abstract_eval(lambda x, **_: jax.core.ShapedArray((), x.dtype))
    lowered = mlir.lower_fun(lambda x, **_: function(x), multiple_results=False)
    mlir.register_lowering(primitive, lowered)
    return primitive


UNVMAP_ANY = marker("unvmap_any", jnp.any)
NONBATCHABLE = marker("nonbatchable", lambda x: x)
MESSAGE = "Nonconstant batch. `equinox.internal.while_loop` has received a batch of values."


def fixed_points(w, x, kind):
    """Return z = tanh(z w + x) of every example, and the number of its iterations."""

    def condition(carry):
        iteration, running, *_ = carry
        goes_on = UNVMAP_ANY.bind(running) & (iteration < 64)
        return goes_on if kind == "no marker" else NONBATCHABLE.bind(goes_on, msg=MESSAGE)

    def body(carry):
        iteration, running, z, counts = carry
        after = jnp.tanh(z @ w + x)
        is_far = jnp.max(jnp.abs(after - z), axis=1) > 1e-3
        return (
            iteration + 1,
            is_far if kind == "starts again" else running & is_far,
            after if kind == "goes on" else jnp.where(running[:, None], after, z),
            jnp.where(running, counts + 1, counts),
        )

    start = 0, jnp.ones(len(x), bool), jnp.zeros_like(x), jnp.zeros(len(x), jnp.int32)
    iteration, _, z, counts = jax.lax.while_loop(condition, body, start)
    return z, jnp.where(iteration > 5, counts, 0) if kind == "reads the number" else counts


def step_of(kind):
    def step(w, x):
        z, counts = fixed_points(w, x, kind)

        def loss(w):
            return jnp.mean(jnp.tanh(jnp.tanh(z @ w + x) @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value, counts

    return step


@pytest.mark.parametrize("method", METHODS)
def test_examples_that_keep_their_values_may_stop_earlier(method):
    parallel = autopar.parallelize(
        step_of("stops"), method=METHODS[method], donate_argnums=(), batch_argnums=(1,)
    )
    results = parallel(WEIGHTS, BATCH)
    expected = jax.jit(step_of("stops"))(WEIGHTS, BATCH)
    assert len(set(expected[2].tolist())) > 3
    assert_allclose(results, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("goes on", "runs until its last example is done"),
        ("starts again", "runs until its last example is done"),
        ("reads the number", "runs until its last example is done"),
        ("no marker", "runs until the batch meets a condition"),
    ],
)
def test_other_loops_over_a_batch_are_refused(kind, message):
    parallel = autopar.parallelize(step_of(kind), method=METHODS["microbatches"])
    with pytest.raises(autopar.MicrobatchError, match=message):
        parallel(WEIGHTS, BATCH)
