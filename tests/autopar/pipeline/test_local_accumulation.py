"""Stages that accumulate gradients per device and sum them once per step equal one device."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.devices import submeshes
from autopar.layering.layers import AutoLayerOption
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.stage_options import ManualStageOption
from autopar.plan import PipelineSchedule
from autopar.planning.pipeline_planner import make_pipeline_plan
from autopar.runtime.local_executable import LocalExecutable
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3
from autopar.tracing.trace import trace
from experiments.models.model_sizes import SMALL
from simulator.hardware.cluster import Cluster
from tests.steps import assert_close_to_scale, sgd_args

COUNT = 2


@pytest.fixture(scope="module")
def trained():
    """Return a traced GPT with two layers and two microbatches, and its results on one device."""
    model = replace(SMALL["gpt"], batch_size=32)
    args = sgd_args(model, optax.sgd(1.0))

    def step(state, batch):
        return model.train_step(state, batch, autopar.value_and_grad)

    return (
        trace(step, args, (1,), COUNT, AutoLayerOption(2), True),
        args,
        jax.jit(model.train_step)(*args),
    )


def planned(step, shapes, options):
    layers = ManualStageOption(
        [[0], [1]], [(1, int(np.prod(shape))) for shape in shapes], shapes, options
    )
    cluster = Cluster.load("cpu-virtual")
    return make_pipeline_plan(
        step, cluster, layers, AUTO, PipelineSchedule(name="1f1b"), "PipeshardParallel"
    )


def as_changes(options):
    names = ("data_parallel", "parameters", "optimizer_state")
    return {name: getattr(options, name) for name in names}


@pytest.mark.parametrize(
    ("first", "second", "ways"),
    [
        pytest.param(DATA_PARALLEL, DATA_PARALLEL, [4, 4], marks=pytest.mark.slow),
        (ZERO2, ZERO3, [4, 4]),
        pytest.param(DATA_PARALLEL, None, [4, 1], marks=pytest.mark.slow),
        pytest.param(None, ZERO2, [1, 4], marks=pytest.mark.slow),
    ],
    ids=["data", "zero", "first stage only", "second stage only"],
)
def test_stages_that_see_parts_of_any_size_compute_what_one_device_does(
    trained, first, second, ways
):
    """Gradients of a mean are smaller in a stage of one device, which has whole microbatches."""
    step, args, expected = trained
    shapes = [(4,) if options is not None else (1,) for options in (first, second)]
    changes = [as_changes(options) if options is not None else {} for options in (first, second)]
    plan = planned(step, shapes, changes)
    assert [stage.mesh.ways(stage.deferred) for stage in plan.stages] == ways
    executable = LocalExecutable(PlannedStep(step, plan), submeshes(jax.devices(), plan.stages))
    actual = executable(*executable.shard_args(*args))
    assert_close_to_scale(actual, expected)


def test_gradients_are_completed_in_the_update_alone(trained):
    step, *_ = trained
    plan = planned(step, [(4,), (4,)], [as_changes(DATA_PARALLEL)] * 2)
    executable = LocalExecutable(PlannedStep(step, plan), submeshes(jax.devices(), plan.stages))
    reduces = {
        task: each.compiled.as_text().count(" all-reduce(")
        for task, each in executable.tasks.items()
    }
    assert all(not count for task, count in reduces.items() if task.phase != "U")
    assert sum(reduces.values()) >= 2
