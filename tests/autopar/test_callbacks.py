"""Steps that call Python equal one device, also where microbatches run on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.testing import assert_allclose

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(16, 32)).astype(np.float32) / 4,
    "v": RNG.normal(size=(32, 16)).astype(np.float32) / 4,
}
BATCH = RNG.normal(size=(64, 16)).astype(np.float32)


def step(params, x):
    def loss(params):
        hidden = jnp.tanh(x @ params["w"]) @ params["v"]
        factor = jax.pure_callback(
            np.asarray, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(2)
        )
        return jnp.mean(hidden**2 * factor)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


over_methods = pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4)),
        autopar.ShardParallel((2, 4), num_micro_batches=4),
        autopar.PipeshardParallel(8, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)),
    ],
    ids=["program", "microbatches", "pipeline"],
)


@over_methods
def test_a_step_that_calls_python_equals_one_device(method):
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-5)
    if method.num_micro_batches == 4 and isinstance(method, autopar.ShardParallel):
        (stage,) = parallel.get_last_executable().plan.stages
        assert len(stage.deferred) == 1, "callbacks run where XLA partitions along the other axis"


@over_methods
def test_a_branch_or_loop_that_only_prints_prints_where_it_is(method, capfd):
    """In the loss it prints for each microbatch, after the gradient once."""

    def print_twice(value):
        def body(i, carry):
            jax.debug.print("inside {} {}", i, value)
            return carry

        jax.lax.fori_loop(0, 2, body, ())

    def print_if_positive(value):
        def prints(value):
            jax.debug.print("after {}", value)

        jax.lax.cond(value > 0, prints, lambda _: None, value)

    def step(params, x):
        def loss(params):
            hidden = jnp.tanh(x @ params["w"]) @ params["v"]
            print_twice((hidden**2).sum())
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(params)
        print_if_positive(value)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    result = parallel(PARAMS, BATCH)
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert_allclose(result, jax.jit(step)(PARAMS, BATCH), rtol=1e-5)
    after = [float(line.split()[1]) for line in lines if line.startswith("after")]
    assert after == [pytest.approx(float(result[1]))]
    assert sum(line.startswith("inside") for line in lines) >= 2 * method.num_micro_batches
