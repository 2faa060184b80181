"""Loss scaling in float16: microbatches overflow exactly if the whole batch overflows."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopar
from tests.tiers import pairs

RNG = np.random.default_rng(0)
ROWS, WIDTH = 32, 8
PARAMS = {
    name: RNG.uniform(0.1, 0.15, (WIDTH, WIDTH)).astype(np.float16) for name in ("first", "second")
}
# examples are similar, so that every microbatch has about the same mean
BATCH = (16 * RNG.uniform(0.99, 1.01, (ROWS, WIDTH))).astype(np.float16)
LARGEST = float(np.finfo(np.float16).max)


def step(params, batch, scale, dtype: Any = np.float16, value_and_grad=autopar.value_and_grad):
    def loss(params):
        hidden = batch.astype(dtype) @ params["first"].astype(dtype)
        autopar.mark_pipeline_boundary()
        return jnp.mean(hidden @ params["second"].astype(dtype)) * scale.astype(dtype)

    value, gradients = value_and_grad(loss)(params)
    return gradients, value


METHODS = {
    "DataParallel": lambda count: autopar.DataParallel(4, num_micro_batches=count),
    "Zero2Parallel": lambda count: autopar.Zero2Parallel(4, num_micro_batches=count),
    "Zero3Parallel": lambda count: autopar.Zero3Parallel(4, num_micro_batches=count),
    "PipeshardParallel": lambda count: autopar.PipeshardParallel(
        4, num_micro_batches=count, layer_option=autopar.ManualLayerOption()
    ),
}


@cache
def planned(method, count):
    return autopar.parallelize(step, method=METHODS[method](count))


@cache
def whole():
    return jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))


@pytest.mark.parametrize(("method", "count"), pairs(METHODS, [8, 2]))
@settings(max_examples=10)
@given(exponent=st.floats(8, 20))
def test_microbatches_overflow_in_float16_if_the_whole_batch_does(method, count, exponent):
    scale = np.float32(2**exponent)
    exact = step(PARAMS, BATCH, jnp.float32(scale), np.float32, jax.value_and_grad)
    sizes = np.concatenate([np.abs(x).ravel() for x in jax.tree.leaves(exact)] + [np.abs([scale])])
    # rounding decides about overflow of values close to the limit
    assume(not np.any((sizes > 0.95 * LARGEST) & (sizes < 1.05 * LARGEST)))
    expected = jax.tree.map(np.asarray, whole()(PARAMS, BATCH, scale))
    results = jax.tree.map(np.asarray, planned(method, count)(PARAMS, BATCH, jnp.float32(scale)))
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=2e-2)


@pytest.mark.parametrize("count", [3, 7])
def test_small_gradients_in_float16_are_not_lost_in_microbatches(count):
    """Each microbatch adds at most half the spacing of subnormals, 2 ** -24, as rounding error."""
    batch = BATCH[:1].repeat(4 * count, 0)
    method = autopar.DataParallel(4, num_micro_batches=count)
    results = autopar.parallelize(step, method=method)(PARAMS, batch, jnp.float32(2**-10))
    exact = step(PARAMS, batch, jnp.float32(2**-10), np.float32, jax.value_and_grad)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=2e-3, atol=(count / 2 + 4) * 2**-24
        )
