"""Random keys as arguments, as results, and as values between stages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import autopar
from autopar.ir.keys import data_aval, impl_of, key_dtype, on_data
from tests.autopar.hosts.workers import pipeline
from tests.autopar.pipeline.stack_steps import descend, stack_batch, stack_params

# --- without Ray


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_name_of_a_key_implementation_gives_its_dtype(impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    assert impl_of(keys.dtype) == impl
    assert key_dtype(impl) == keys.dtype
    data = jax.random.key_data(keys)
    assert (data_aval(keys).shape, data_aval(keys).dtype) == (data.shape, data.dtype)


def test_a_function_of_keys_is_converted_to_one_of_their_data():
    def function(key: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [jax.random.fold_in(key, 7), jax.random.normal(key) + x]

    key, x = jax.random.key(3), jnp.float32(1)
    results = jax.jit(on_data(function, [jax.typeof(key), jax.typeof(x)]))(
        jax.random.key_data(key), x
    )
    folded, drawn = function(key, x)
    np.testing.assert_array_equal(results[0], jax.random.key_data(folded))
    assert_allclose(results[1], drawn, rtol=1e-5)


# --- on a Ray cluster


def dropout_step(state: Any, batch: Any, key: jax.Array) -> Any:
    """Take a step with dropout: layers draw random numbers and pass keys on, as does the state."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        x = batch["x"] + jax.random.normal(state["seed"])
        layer_key = key
        for i in range(4):
            if i:
                autopar.mark_pipeline_boundary()
            layer_key, mask_key = jax.random.split(layer_key)
            x = jnp.tanh(x @ params[f"w{i}"]) * jax.random.bernoulli(mask_key, 0.8, x.shape)
        return jnp.mean((x - batch["y"]) ** 2)

    params, value = descend(state["params"], autopar.value_and_grad(loss)(state["params"]))
    return {"params": params, "seed": jax.random.fold_in(state["seed"], 1)}, value


def first_state() -> Any:
    return {"params": stack_params(), "seed": jax.random.key(5)}


def train(step: Any, state: Any, count: int = 2) -> tuple[Any, Any]:
    value = None
    for k in range(count):
        state, value = step(state, stack_batch(), jax.random.key(k))
    return state, value


def assert_as_one_device(actual: tuple[Any, Any]) -> None:
    (state, value), (expected, loss) = actual, train(jax.jit(dropout_step), first_state())
    assert_allclose(np.array(value), loss, rtol=1e-5)
    for name, leaf in expected["params"].items():
        assert_allclose(np.array(state["params"][name]), leaf, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state["seed"].key_data(), jax.random.key_data(expected["seed"]))


@pytest.mark.hosts(2, 4)
def test_stages_on_hosts_draw_as_one_device_does(hosts):
    function = autopar.parallelize(dropout_step, method=pipeline(2), donate_argnums=(0,))
    state, value = train(function, first_state())
    assert_as_one_device((state, value))
    executable = function.get_last_executable()
    sent_names = {name for name, _ in executable.description.job.deliveries}
    keys = {
        operand.name
        for call in executable.description.job.calls.values()
        for operand in call.operands
        if operand.impl
    }
    assert sent_names & keys  # a stage sends a key to the next
    assert executable.profile_with_dummy_inputs(warmup=0, number=1, repeat=1).shape == (1,)

    seed = state["seed"]
    assert (seed.shape, seed.dtype, seed.sharding.spec) == ((), jax.random.key(0).dtype, jax.P())
    with pytest.raises(
        TypeError, match=r"random keys, which can't be a numpy array; use its method key_data"
    ):
        np.array(seed)
    with pytest.raises(TypeError, match="has no random keys"):
        value.key_data()
    assert jnp.asarray(seed).dtype == seed.dtype
    specs = executable.get_input_placement_specs()
    assert specs[0]["seed"].aval.dtype == specs[2].aval.dtype == seed.dtype


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_state_with_a_key_is_created_and_restored_with_the_placement_of_its_step(hosts, tmp_path):
    step = autopar.parallelize(dropout_step, method=autopar.ShardParallel(devices=(4,)))
    make = autopar.parallelize(
        first_state, method=autopar.CreateStateParallel(step, (stack_batch(), jax.random.key(0)))
    )
    state, value = train(step, make())
    assert_as_one_device((state, value))
    autopar.save_checkpoint(tmp_path, state, 2)
    placements = step.get_last_executable().get_input_placement_specs()[0]
    assert_as_one_device((autopar.restore_checkpoint(tmp_path, placement_specs=placements), value))


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_what_is_computed_before_the_step_is_sent_to_the_hosts(hosts):
    """The batch is permuted by a key that is on the hosts."""

    def permuted_step(state: Any, batch: Any) -> Any:
        order = jax.random.permutation(state["seed"], batch["x"].shape[0])

        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            x = batch["x"] + batch["x"][order]
            for i in range(4):
                if i:
                    autopar.mark_pipeline_boundary()
                x = jnp.tanh(x @ params[f"w{i}"])
            return jnp.mean((x - batch["y"]) ** 2)

        params, value = descend(state["params"], autopar.value_and_grad(loss)(state["params"]))
        return {"params": params, "seed": jax.random.fold_in(state["seed"], 1)}, value

    function = autopar.parallelize(permuted_step, method=pipeline(2), donate_argnums=(0,))
    state, expected = first_state(), first_state()
    for _ in range(2):
        state, value = function(state, stack_batch())
        expected, loss = jax.jit(permuted_step)(expected, stack_batch())
        assert_allclose(np.array(value), loss, rtol=1e-5)
    assert function.get_last_executable().step.preparation is not None


@pytest.mark.hosts(2, 2)
@pytest.mark.parametrize(
    "method",
    [autopar.ShardParallel(), pipeline(2, layer_option=autopar.AutoLayerOption(2))],
    ids=["whole", "stages"],
)
def test_hosts_compute_in_the_precision_of_the_driver_and_without_its_mesh(hosts, method):
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = batch["x"]
            for weights in params.values():
                hidden = jnp.tanh(hidden @ weights)
            return ((hidden - batch["y"]) ** 2).mean()

        return descend(params, autopar.value_and_grad(loss)(params))

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        args = jax.tree.map(np.float64, (stack_params(), stack_batch()))
        results = autopar.parallelize(step, method=method, donate_argnums=())(*args)
        expected = jax.jit(step)(*args)
        for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            assert result.dtype == wanted.dtype == np.float64
            assert_allclose(np.asarray(result), wanted, rtol=1e-10)
