"""Models with manual or automatic layers train in a pipeline as on one device.

Pipelines with equal stages share executables in all schedules, so that few are compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import pytest
from flax import linen as nn

import autopar
from autopar import AutoLayerOption, ManualLayerOption, ShardingOptions, UniformStageOption
from experiments.models.model import Model
from experiments.models.model_sizes import SMALL
from tests.autopar.pipeline.stack_steps import assert_as_serial, pipeline
from tests.steps import assert_close_to_scale, model_step, sgd_args
from tests.tiers import covering

QUICK = ShardingOptions(mode="heuristic")  # valid shardings without a solver
STEPS = 3

MODELS: dict[str, tuple[Model, int, tuple[str, ...]]] = {
    "mlp": (SMALL["mlp"], 4, ("Dense_1", "Dense_2", "Dense_3")),
    "gpt": (SMALL["gpt"], 4, ("block_1", "feed_forward")),
    "bert": (replace(SMALL["bert"], num_layers=2), 4, ("block_1", "feed_forward")),
    "moe": (SMALL["moe"], 1, ("block_1", "feed_forward", "experts")),
    "wide_resnet": (SMALL["wide_resnet"], 1, ("block_0_0", "block_1_0", "head")),
}
"""Each model with the most microbatches that it allows and the modules where a layer begins."""


@pytest.fixture(autouse=True, scope="module")
def without_optimizations() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@contextmanager
def boundaries(modules: tuple[str, ...]) -> Iterator[None]:
    """Begin a layer at each of the modules within this context."""

    def mark(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        if context.module.name in modules and context.method_name == "__call__":
            autopar.mark_pipeline_boundary()
        return call(*args, **kwargs)

    with nn.intercept_methods(mark):
        yield


@cache
def step_of(name: str) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Return the training step of a model and its arguments."""
    model, _, modules = MODELS[name]

    def step(state: Any, batch: Any) -> Any:
        with boundaries(modules):
            result = model.train_step(state, batch, autopar.value_and_grad)
        return result if isinstance(result, tuple) else (result,)

    return step, sgd_args(model)


@cache
def serial_results(name: str) -> list[Any]:
    """Return the results of steps on one device, each of which begins with the state."""
    step, (state, batch) = step_of(name)
    serial, results = jax.jit(step), []
    for _ in range(STEPS):
        results.append(serial(state, batch))
        state = results[-1][0]
    return results


@cache
def parallelized(
    name: str, stages: int, layers: str, schedule: str
) -> autopar.ParallelizedFunction:
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    option = ManualLayerOption() if layers == "manual" else AutoLayerOption(4)
    method = pipeline(
        MODELS[name][1],
        devices=stages // chunks,
        pipeline_schedule=schedule,
        num_chunks=chunks,
        layer_option=option,
        stage_option=UniformStageOption(stages),
        default_auto_sharding_option=QUICK,
    )
    return autopar.parallelize(step_of(name)[0], method=method, donate_argnums=())


def assert_trains_as_serial(name: str, stages: int, layers: str, schedule: str) -> None:
    _, (state, batch) = step_of(name)
    step = parallelized(name, stages, layers, schedule)
    for result in serial_results(name):
        actual = step(state, batch)
        assert_close_to_scale(actual, result)
        state = actual[0]


SCHEDULES = ("gpipe", "1f1b", "1f1b_overlap_friendly", "zero_bubble_h1")


ALL_PAIRS = covering(
    list(
        product(MODELS, [2, 4], ["manual", "automatic"], [*SCHEDULES, "interleaved_1f1b"]),
    ),
    2,
)
QUICKEST = ("mlp", 2, "manual", "gpipe")
"""The test of the fast tier; `test_pipelined_steps` runs every schedule."""


@pytest.mark.parametrize(
    ("name", "stages", "layers", "schedule"),
    [pytest.param(*row, marks=() if row == QUICKEST else (pytest.mark.slow,)) for row in ALL_PAIRS],
)
def test_a_model_trains_as_on_one_device(
    name: str, stages: int, layers: str, schedule: str
) -> None:
    assert_trains_as_serial(name, stages, layers, schedule)


@pytest.mark.slow
def test_a_model_with_layers_in_a_loop_trains_as_on_one_device() -> None:
    model = SMALL["gpt_scanned"]
    method = pipeline(
        2, devices=2, layer_option=AutoLayerOption(2), default_auto_sharding_option=QUICK
    )
    assert_as_serial(model_step(model), method, *sgd_args(model), rtol=1e-4)


@pytest.mark.parametrize(
    "layers",
    [
        ManualLayerOption(remat_layer=True),
        AutoLayerOption(2, remat_layer=True),
        AutoLayerOption(2, remat_layer=True, remat_parts=4),
    ],
    ids=str,
)
def test_recomputed_layers_train_as_on_one_device(layers: Any) -> None:
    step, args = step_of("mlp")
    assert_as_serial(
        step,
        pipeline(devices=8, layer_option=layers, stage_option=UniformStageOption(2)),
        *args,
        steps=3,
    )


def test_schedules_share_the_executables_of_their_stages() -> None:
    first, second = (parallelized("mlp", 2, "manual", schedule) for schedule in ("gpipe", "1f1b"))
    _, args = step_of("mlp")
    tasks = [step.get_executable(*args).tasks for step in (first, second)]
    assert {task: task_executable.compiled for task, task_executable in tasks[0].items()} == {
        task: task_executable.compiled for task, task_executable in tasks[1].items()
    }
