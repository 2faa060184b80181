"""A mixture of experts shards its experts over the devices and sends the tokens to them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from autopar.report import classify
from autopar.tracing.trace import trace
from experiments.models.moe import ExpertBlock
from tests.autopar.checks.compiled_plans import in_plan, on_gpus, planned


def step(state, batch):
    def loss(params):
        y, balance = state.apply_fn(params, batch["x"])
        return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance

    value, gradients = autopar.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


@pytest.fixture(scope="module")
def plan():
    model = ExpertBlock(num_heads=16, num_experts=16, group_size=32, widening=4, dtype=jnp.float32)

    def init():
        x = jnp.zeros((64, 16, 64))
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)), {
            "x": x,
            "y": x,
        }

    return planned(trace(step, jax.eval_shape(init), (1,)), (4,))


def test_experts_are_spread_over_the_devices(plan):
    classes = classify(plan)
    for name in ("up", "down"):
        assert classes[f"0/params/params/experts/{name}"].label == "expert on x"


@pytest.mark.slow
def test_tokens_are_exchanged_twice_in_each_direction_of_the_step(plan):
    assert in_plan(plan)["all_to_all"] == 4
    assert on_gpus(plan)["all_to_all"] == 4
