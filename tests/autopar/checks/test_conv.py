"""Strided convolutions with BatchNorm are data parallel, or model parallel with many channels."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.sharding.options import DATA_PARALLEL
from autopar.tracing.trace import trace
from tests.autopar.checks.compiled_plans import collectives, kinds, planned
from tests.tiers import slow

LAYERS = 3


class ConvNet(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = nn.Conv(self.channels, (3, 3), strides=(2, 2))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.max_pool(x, (2, 2), (1, 1), "SAME")
        return x


def traced(channels, size, batch_size):
    model, optimizer = ConvNet(channels), optax.adam(1e-2)

    def init():
        x = jnp.zeros((batch_size, size, size, channels))
        variables = model.init(jax.random.key(0), x)
        params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
        y, _ = model.apply(variables, x, mutable=["batch_stats"])
        return {"params": params, "rest": rest, "opt": optimizer.init(params)}, {"x": x, "y": y}

    def step(state, batch):
        def loss(params):
            y, rest = model.apply(
                {"params": params, **state["rest"]}, batch["x"], mutable=["batch_stats"]
            )
            return jnp.mean((y - batch["y"]) ** 2), rest

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "rest": rest,
            "opt": opt,
        }, value

    return trace(step, jax.eval_shape(init), (1,))


@pytest.mark.parametrize("mesh", [*slow((4,)), (2, 2)])
def test_data_parallelism_reduces_gradients_and_batch_statistics_in_both_passes(mesh):
    plan = planned(traced(channels=8, size=16, batch_size=16), mesh, DATA_PARALLEL)
    assert collectives(plan) == Counter(all_reduce=1 + 2 * LAYERS)


def test_wide_channels_are_split_with_an_all_reduce_between_layers():
    plan = planned(traced(channels=256, size=4, batch_size=4), (4,))
    assert collectives(plan) == Counter(all_reduce=LAYERS - 1)
    assert kinds(plan) == ["column on x", "row on x", "column on x"]
