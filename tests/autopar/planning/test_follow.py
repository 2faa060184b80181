"""States are created with the placements of a training step, which evaluations follow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import autopar
from autopar import (
    CreateStateParallel,
    FollowParallel,
    PipeshardParallel,
    ShardParallel,
    Zero3Parallel,
)
from autopar.testing import assert_allclose
from simulator.program import Send
from tests.tiers import fast


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(64)(x))
        autopar.mark_pipeline_boundary()
        return nn.Dense(32)(x)


def create_state(seed: int = 0) -> TrainState:
    model = Model()
    params = model.init(jax.random.key(seed), jnp.ones((1, 32)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def train_step(state: TrainState, batch: dict[str, Any]) -> TrainState:
    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    return state.apply_gradients(grads=autopar.grad(loss)(state.params))


def evaluate(params: Any, batch: dict[str, Any]) -> Any:
    out = Model().apply(params, batch["x"])
    assert isinstance(out, jax.Array)
    return {
        "loss": jnp.mean((out - batch["y"]) ** 2),
        "out": out,
        "first": batch["x"][:, 0],
        "x": batch["x"],
        "three": 3,
    }


def batch(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 1, (rows, 32)).astype(np.float32) for name in ("x", "y")}


METHODS = {
    "shard": ShardParallel(4),
    "shard in microbatches": ShardParallel((2, 2), num_micro_batches=2),
    "ZeRO-3": Zero3Parallel(4),
    "pipeline": PipeshardParallel(4, 2),
    "pipeline in a V": PipeshardParallel(2, 2, pipeline_schedule="zero_bubble_v"),
}


@pytest.fixture(scope="module", params=fast(METHODS, ["shard in microbatches", "pipeline in a V"]))
def trained(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], Any, Any]:
    """Return a training step, the function that creates its state, and a state after one step."""
    step = autopar.parallelize(train_step, method=METHODS[request.param], donate_argnums=())
    create = autopar.parallelize(
        create_state, method=CreateStateParallel(step, [batch(8)]), static_argnums=()
    )
    return step, create, step(create(), batch(8))


def test_a_state_is_created_with_the_placements_of_the_step(trained: Any) -> None:
    step, create, _ = trained
    state = create()
    executable = step.get_executable(state, batch(8))
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == jax.tree.leaves(
        executable.in_shardings[0]
    )
    assert_allclose(jax.device_get(state.params), jax.device_get(create_state().params))
    created = create.get_last_executable().get_output_placement_specs()
    assert jax.tree.leaves(created) == jax.tree.leaves(executable.get_input_placement_specs()[0])
    assert (
        len(step._executables) == 1
    )  # the created state has the structure that the step was compiled for


def test_an_evaluation_finds_the_parameters_where_training_left_them(trained: Any) -> None:
    step, _, state = trained
    count = 2 if isinstance(step.method, PipeshardParallel) else None
    follower = autopar.parallelize(evaluate, method=FollowParallel(step, num_micro_batches=count))
    actual = follower(state.params, batch(16))
    assert_allclose(actual, evaluate(jax.device_get(state.params), batch(16)))
    executable = follower.get_last_executable()
    wanted = step.get_last_executable().get_input_placement_specs()[0].params
    assert executable.get_input_placement_specs()[0] == wanted
    assert executable.get_output_placement_specs()["out"].aval.shape == (16, 32)
    again = autopar.parallelize(
        evaluate, method=autopar.PlanMethod(autopar.Plan.from_json(executable.plan.to_json()))
    )
    assert_allclose(again(state.params, batch(16)), actual)


def test_a_whole_state_may_be_followed(trained: Any) -> None:
    step, _, state = trained
    follower = autopar.parallelize(
        lambda state, batch: evaluate(state.params, batch)["loss"], method=FollowParallel(step)
    )
    assert_allclose(
        follower(state, batch(16)), evaluate(jax.device_get(state.params), batch(16))["loss"]
    )
    executable = follower.get_last_executable()
    assert (
        executable.get_input_placement_specs()[0]
        == step.get_last_executable().get_input_placement_specs()[0]
    )


def test_in_a_pipeline_only_activations_travel() -> None:
    step = autopar.parallelize(train_step, method=METHODS["pipeline"], donate_argnums=())
    state = create_state()
    step.get_executable(state, batch(8))
    state = step(state, batch(8))
    follower = autopar.parallelize(
        lambda params, b: evaluate(params, b)["loss"], method=FollowParallel(step, 4)
    )
    program = follower.get_executable(state.params, batch(16)).program
    sends = [send for row in program.instructions for send in row if isinstance(send, Send)]
    assert [(send.to, send.num_bytes) for send in sends] == [(1, 4 * 64 * 4)] * 4


def test_only_parallelized_steps_that_were_compiled_can_be_followed() -> None:
    with pytest.raises(TypeError, match=r"src_func.*autopar.parallelize"):
        autopar.parallelize(evaluate, method=FollowParallel(train_step))(
            create_state().params, batch(8)
        )
    step = autopar.parallelize(train_step, method=METHODS["shard"])
    with pytest.raises(ValueError, match="not been compiled yet"):
        autopar.parallelize(evaluate, method=FollowParallel(step))(create_state().params, batch(8))
    step(create_state(), batch(8))
    with pytest.raises(ValueError, match="no pipeline; leave it out"):
        autopar.parallelize(evaluate, method=FollowParallel(step, 2))(
            create_state().params, batch(8)
        )


def test_rows_may_be_in_any_dim() -> None:
    def turned(params: Any, batch: dict[str, Any]) -> jax.Array:
        return evaluate(params, batch)["out"].T

    step = autopar.parallelize(train_step, method=METHODS["pipeline"], donate_argnums=())
    state = step(create_state(), batch(8))
    following = autopar.parallelize(turned, method=FollowParallel(step, 2))
    assert_allclose(
        following(state.params, batch(8)),
        turned(jax.device_get(state.params), batch(8)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_an_evaluation_draws_random_bits_as_the_step_that_it_follows() -> None:
    def sampled(params: Any, batch: dict[str, Any], key: jax.Array) -> jax.Array:
        out = evaluate(params, batch)["out"]
        return out * jax.random.bernoulli(key, 0.5, out.shape)

    method = PipeshardParallel(2, 2, rng="fold_in")
    step = autopar.parallelize(train_step, method=method, donate_argnums=())
    params = step(create_state(), batch(8)).params
    key = jax.random.key(0, impl="rbg")
    follower = autopar.parallelize(sampled, method=FollowParallel(step, 2))
    assert follower.get_executable(params, batch(8), key).plan.rng == "fold_in"
    exact = autopar.parallelize(sampled, method=FollowParallel(step, 2, rng="exact"))
    assert_allclose(
        exact(params, batch(8), key),
        sampled(jax.device_get(params), batch(8), key),
        rtol=1e-5,
        atol=1e-6,
    )
    assert exact.get_last_executable().plan.rng == "exact"
