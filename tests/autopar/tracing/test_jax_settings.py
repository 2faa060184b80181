"""A step is planned again under other settings of JAX, as `jax.jit` compiles it again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.testing import assert_allclose

WEIGHTS = np.ones((4, 4), np.float32)
BATCH = np.ones((8, 4), np.float32)
SETTINGS = {
    "x64": (jax.enable_x64, True),
    "threefry": (jax.threefry_partitionable, False),
    "precision": (jax.default_matmul_precision, "highest"),
    "generator": (jax.default_prng_impl, "rbg"),
}


def step(weights, batch):
    def loss(weights):
        noise = jax.random.normal(jax.random.key(0), batch.shape)
        return (jnp.tanh(batch @ weights) * noise).mean() + jnp.arange(3.0).sum()

    return jax.value_and_grad(loss)(weights)


@pytest.mark.parametrize(("setting", "value"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_step_computes_what_the_settings_of_the_call_say(setting, value):
    parallel = autopar.parallelize(step, method=autopar.ShardParallel(2), donate_argnums=())
    plain = parallel(WEIGHTS, BATCH)
    executable = parallel.get_last_executable()
    with setting(value):
        results = parallel(WEIGHTS, BATCH)
        # jax.jit does not look at the default generator: this function is new to it
        expected = jax.jit(lambda *args: step(*args))(WEIGHTS, BATCH)
        assert_allclose(results, expected, rtol=1e-6)
        assert results[0].dtype == expected[0].dtype
        assert parallel.get_last_executable() is not executable
    assert_allclose(parallel(WEIGHTS, BATCH), plain, rtol=0)
    assert parallel.get_last_executable() is executable


def test_disable_jit_is_refused_with_what_to_call():
    parallel = autopar.parallelize(step, method=autopar.ShardParallel(2), donate_argnums=())
    parallel(WEIGHTS, BATCH)
    with jax.disable_jit():
        with pytest.raises(RuntimeError, match=r"step runs compiled.* the attribute fun"):
            parallel(WEIGHTS, BATCH)
        assert np.isfinite(parallel.fun(WEIGHTS, BATCH)[0])
