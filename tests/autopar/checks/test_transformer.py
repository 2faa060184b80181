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
from tests.tiers import slow

LAYERS = 2
KINDS = {"qkv": "column", "attention/out": "row", "up": "column", "down": "row"}


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = Block(8, jnp.float32, norm_first=False, name=f"layer_{i}")(x)
        return x


def traced_and_make_args(batch_size):
    model = Encoder()

    def make_args():
        x = jax.random.normal(jax.random.key(1), (batch_size, 8, 128))
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)), {
            "x": x,
            "y": x,
        }

    return trace(mlp_step, jax.eval_shape(make_args), (1,)), make_args


@pytest.fixture(scope="module")
def bert():
    return traced_and_make_args(8)[0]


def test_data_parallelism_is_one_all_reduce(bert):
    assert collectives(planned(bert, (4,), DATA_PARALLEL)) == Counter(all_reduce=1)


@pytest.mark.parametrize("mesh", [(4,), *slow((1, 4))])
def test_model_parallelism_needs_an_all_reduce_per_half_layer_in_each_direction(bert, mesh):
    """There are 4 L - 1, because the gradient of the first layer's input is not computed."""
    plan = planned(bert, mesh)
    axis = "xy"[mesh.index(4)]
    assert collectives(plan)["all_reduce"] == 4 * LAYERS - 1
    for layer, kind in KINDS.items():
        assert kinds(plan, f"{layer}/kernel") == [f"{kind} on {axis}"] * LAYERS


def test_on_a_square_mesh_one_axis_is_data_parallel_and_the_other_model_parallel(bert):
    """Gradients need one all_reduce more than model parallelism alone."""
    options = ShardingOptions(
        batch_axis="x", parameters="any", forbidden=frozenset({"reduce_scatter"})
    )
    plan = planned(bert, (2, 2), options)
    assert collectives(plan)["all_reduce"] == 4 * LAYERS
    for layer, kind in KINDS.items():
        assert kinds(plan, f"{layer}/kernel") == [f"data parallel on x, {kind} on y"] * LAYERS


@pytest.mark.parametrize("mesh", [*slow((4,)), (2, 2)])
def test_a_batch_of_one_is_planned(mesh):
    step, _ = traced_and_make_args(1)
    assert sum(collectives(planned(step, mesh)).values()) > 0


def test_data_parallelism_splits_the_batch_dim_even_if_the_feature_dim_is_larger():
    """LayerNorm multiplies its scale, one number per feature, by one number per token."""

    def step(scale, x):
        return jnp.mean((x * (jax.lax.rsqrt((x**2).mean(-1, keepdims=True)) * scale)) ** 2)

    args = (jnp.ones(128), jax.random.normal(jax.random.key(0), (8, 128)))
    plan = planned(trace(step, args, (1,)), (4,), DATA_PARALLEL)
    assert collectives(plan) == Counter()
    assert_allclose(step(*args), 1.0, rtol=1e-3)
