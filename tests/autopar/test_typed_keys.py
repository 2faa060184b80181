"""Typed random keys in a state work with checkpoints, reports and fetching under every plan."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import autopar
from tests.autopar.pipeline.stack_steps import descend, stack_batch, stack_params
from tests.tiers import fast


def noisy_step(state: Any, batch: Any) -> Any:
    """Run a step whose loss draws from a key; each example has a key of another implementation."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        x = batch["x"] + jax.random.normal(state["key"])
        for i in range(4):
            if i:
                autopar.mark_pipeline_boundary()
            x = jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean((x - batch["y"]) ** 2)

    params, _ = descend(state["params"], autopar.value_and_grad(loss)(state["params"]))
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 2))(state["keys"])
    return {"params": params, "key": jax.random.fold_in(state["key"], 1), "keys": keys}


def first() -> Any:
    keys = jax.random.split(jax.random.key(6, impl="rbg"), 8)
    return {"params": stack_params(), "key": jax.random.key(5), "keys": keys}


def expected(steps: int) -> Any:
    state, step = first(), jax.jit(noisy_step)
    for _ in range(steps):
        state = step(state, stack_batch())
    return state


def assert_same(state: Any, other: Any) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert mine.dtype == theirs.dtype
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            assert_array_equal(jax.random.key_data(mine), jax.random.key_data(theirs))
        else:
            assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def batches(k: int) -> list[Any]:
    return [stack_batch()] * (6 - k)


METHODS = {
    "shards": autopar.ShardParallel((2, 4)),
    "ZeRO-3": autopar.Zero3Parallel(8),
    "microbatches": autopar.ShardParallel(8, 2),
    "pipeline": autopar.PipeshardParallel(
        num_micro_batches=2, stage_option=autopar.UniformStageOption(2)
    ),
}


@pytest.fixture(scope="module", params=fast(METHODS, ["microbatches", "pipeline"]))
def function(request):
    return autopar.parallelize(noisy_step, method=METHODS[request.param])


def test_a_state_with_keys_is_saved_restored_and_goes_on(function, tmp_path):
    autopar.save_checkpoint(tmp_path, function(first(), stack_batch()), 1)
    placements = function.get_executable(first(), stack_batch()).get_input_placement_specs()[0]
    restored = autopar.restore_checkpoint(tmp_path, placement_specs=placements)
    assert_same(restored, expected(1))
    assert_same(function(restored, stack_batch()), expected(2))


def test_a_loop_with_keys_is_resumed_also_when_no_step_is_left(function, tmp_path):
    assert_same(autopar.train(function, first(), batches, 2, tmp_path), expected(2))
    assert_same(autopar.train(function, first(), batches, 4, tmp_path), expected(4))
    assert_same(autopar.train(function, first(), lambda k: [], 4, tmp_path), expected(4))


def test_placements_and_dumps_and_loaders_know_keys(function, tmp_path):
    executable = function.get_executable(first(), stack_batch())
    inputs, outputs = (
        executable.get_input_placement_specs(),
        executable.get_output_placement_specs(),
    )
    for specs in (inputs[0], outputs):
        assert {name: specs[name].aval.dtype for name in ("key", "keys")} == {
            name: first()[name].dtype for name in ("key", "keys")
        }
    assert executable.dump_debug_info(tmp_path)
    (brought,) = autopar.DataLoader([first()], inputs[0])
    assert_same(brought, first())
    assert brought["keys"].sharding.is_equivalent_to(executable.in_shardings[0]["keys"], 1)


def test_a_pipeline_with_keys_of_any_implementation_is_timed_on_zeros():
    executable = autopar.parallelize(noisy_step, method=METHODS["pipeline"]).get_executable(
        first(), stack_batch()
    )
    assert executable.profile_with_dummy_inputs(warmup=0, number=1, repeat=1).shape == (1,)
