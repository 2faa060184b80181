"""Models of the sweep, cut into layers by hand and by clustering, train in a pipeline as on one device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import autopar
from autopar import AutoLayerOption, ManualLayerOption, ShardingOptions
from experiments.models.published import SMALL
from tests.autopar.pipeline.steps import SGD, assert_as_serial, pipeline, sgd_args, stack_batch

QUICK = ShardingOptions(mode="heuristic")  # a sharding like any other, without a solver


class MLP(nn.Module):
    """Four layers with a boundary in the middle."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(4):
            x = nn.relu(nn.Dense(64 if i % 2 == 0 else 16)(x))
            if i == 1:
                autopar.mark_pipeline_boundary()
        return x


def mlp_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    value, gradients = autopar.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def layer_option(kind: str, remat: bool) -> Any:
    return ManualLayerOption(remat) if kind == "manual" else AutoLayerOption(2, remat)


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("layers", ["manual", "automatic"])
def test_an_mlp_trains_as_on_one_device(layers: str, remat: bool) -> None:
    module = MLP()
    params = module.init(jax.random.key(0), jnp.ones((1, 16)))
    state = TrainState.create(apply_fn=module.apply, params=params, tx=SGD)
    method = pipeline(devices=8, layer_option=layer_option(layers, remat))
    step = assert_as_serial(mlp_step, method, state, stack_batch(), steps=3)
    assert [stage.layers for stage in step.get_executable(state, stack_batch()).plan.stages] == [(0,), (1,)]


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
def test_bert_trains_as_on_one_device(remat: bool) -> None:
    model = replace(SMALL["bert"], num_layers=2)
    method = pipeline(1, 2, layer_option=AutoLayerOption(2, remat), default_auto_sharding_option=QUICK)
    assert_as_serial(lambda s, b: model.train_step(s, b, autopar.value_and_grad), method, *sgd_args(model))


@pytest.mark.parametrize(
    ("name", "stages", "devices", "num_micro_batches", "schedule"),
    [
        ("gpt", 2, 2, 4, "zero_bubble_h1"),
        ("gpt_scanned", 2, 2, 2, "1f1b"),
        ("moe", 2, 2, 1, "gpipe"),
        ("wide_resnet", 2, 2, 1, "1f1b"),
    ],
)
def test_other_models_train_as_on_one_device(
    name: str, stages: int, devices: int, num_micro_batches: int, schedule: str
) -> None:
    model = SMALL[name]
    method = pipeline(
        num_micro_batches,
        devices=devices,
        pipeline_schedule=schedule,
        layer_option=AutoLayerOption(stages),
        default_auto_sharding_option=QUICK,
    )
    assert_as_serial(lambda s, b: model.train_step(s, b, autopar.value_and_grad), method, *sgd_args(model), rtol=1e-4)
