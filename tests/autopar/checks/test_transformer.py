"""Two BERT layers with fused projections are data parallel, model parallel, or both."""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from autopar.sharding.options import DATA_PARALLEL, ShardingOptions
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from experiments.models.transformer import Block
from tests.autopar.checks.compiled_plans import collectives, kinds, planned
from tests.steps import mlp_step

LAYERS = 2


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = Block(8, jnp.float32, norm_first=False, name=f"layer_{i}")(x)
        return x


def step_and_args(batch_size):
    model = Encoder()

    def init():
        x = jax.random.normal(jax.random.key(1), (batch_size, 8, 128))
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)), {
            "x": x,
            "y": x,
        }

    return trace(mlp_step, jax.eval_shape(init), (1,)), init


@pytest.fixture(scope="module")
def bert():
    return step_and_args(8)[0]


def test_data_parallelism_is_one_all_reduce(bert):
    assert collectives(planned(bert, (4,), DATA_PARALLEL)) == Counter(all_reduce=1)


@pytest.mark.parametrize("mesh", [(4,), (1, 4)])
def test_model_parallelism_is_an_all_reduce_for_each_half_of_a_layer_forward_and_backward(
    bert, mesh
):
    """4 L - 1 all_reduces, because the gradient of the first layer's input is not computed."""
    found = planned(bert, mesh)
    axis = "xy"[mesh.index(4)]
    assert collectives(found)["all_reduce"] == 4 * LAYERS - 1
    for layer, kind in [
        ("qkv", "column"),
        ("attention/out", "row"),
        ("up", "column"),
        ("down", "row"),
    ]:
        assert kinds(found, f"{layer}/kernel") == [f"{kind} on {axis}"] * LAYERS


def test_a_square_mesh_with_the_batch_on_one_axis_has_the_model_on_the_other(bert):
    """There is one more all_reduce than in model parallelism, that of the gradients."""
    options = ShardingOptions(
        batch_axis="x", parameters="any", forbidden=frozenset({"reduce_scatter"})
    )
    found = planned(bert, (2, 2), options)
    assert collectives(found)["all_reduce"] == 4 * LAYERS
    for layer, kind in [
        ("qkv", "column"),
        ("attention/out", "row"),
        ("up", "column"),
        ("down", "row"),
    ]:
        assert kinds(found, f"{layer}/kernel") == [f"data parallel on x, {kind} on y"] * LAYERS


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_batch_of_one_is_planned(mesh):
    step, _ = step_and_args(1)
    assert sum(collectives(planned(step, mesh)).values()) > 0


def test_a_scale_per_feature_follows_a_small_batch():
    """LayerNorm combines its scale with one number per token.

    There are fewer tokens than features, but the tokens have the batch dim.
    """

    def step(scale, x):
        return jnp.mean((x * (jax.lax.rsqrt((x**2).mean(-1, keepdims=True)) * scale)) ** 2)

    args = (jnp.ones(128), jax.random.normal(jax.random.key(0), (8, 128)))
    found = planned(trace(step, args, (1,)), (4,), DATA_PARALLEL)
    assert collectives(found) == Counter()
    assert_allclose(step(*args), 1.0, rtol=1e-3)
