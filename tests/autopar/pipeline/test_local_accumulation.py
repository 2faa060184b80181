"""Stages that accumulate gradients per device and sum them once per step equal one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.devices import submeshes
from autopar.layering.layer_options import AutoLayerOption
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.stage_options import ManualStageOption
from autopar.plan import PipelineSchedule
from autopar.planning.pipeline_planner import PipelinePlanner
from autopar.runtime.local_executable import LocalExecutable
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from experiments.models.model_sizes import SMALL
from simulator.hardware.cluster import Cluster
from tests.steps import assert_close_to_scale, model_step, sgd_args

COUNT = 2


@pytest.fixture(scope="module")
def traced_gpt():
    """Return a traced GPT with two layers and two microbatches, and its results on one device."""
    model = replace(SMALL["gpt"], batch_size=32)
    args = sgd_args(model, optax.sgd(1.0))

    return (
        trace(
            model_step(model),
            args,
            (1,),
            COUNT,
            TraceOptions(layers=AutoLayerOption(2), marked=True),
        ),
        args,
        jax.jit(model.train_step)(*args),
    )


def planned(step, shapes, options):
    layers = ManualStageOption(
        [[0], [1]], [(1, int(np.prod(shape))) for shape in shapes], shapes, options
    )
    cluster = Cluster.load("cpu-virtual")
    planner = PipelinePlanner(step, cluster, AUTO)
    return planner.plan(layers, PipelineSchedule(name="1f1b"), "PipeshardParallel")


def option_fields(options):
    names = ("data_parallel", "parameters", "optimizer_state")
    return {name: getattr(options, name) for name in names}


@pytest.mark.parametrize(
    ("first", "second", "ways"),
    [
        pytest.param(DATA_PARALLEL, DATA_PARALLEL, [4, 4], marks=pytest.mark.slow),
        pytest.param(ZERO2, ZERO3, [4, 4], marks=pytest.mark.slow),
        pytest.param(DATA_PARALLEL, None, [4, 1], marks=pytest.mark.slow),
        pytest.param(None, ZERO2, [1, 4], marks=pytest.mark.slow),
    ],
    ids=["data", "zero", "first stage only", "second stage only"],
)
def test_stages_with_data_parallelism_of_different_degrees_equal_one_device(
    traced_gpt, first, second, ways
):
    """A device has whole microbatches or parts of them, which scales gradients of a mean."""
    step, args, expected = traced_gpt
    shapes = [(4,) if options is not None else (1,) for options in (first, second)]
    changes = [option_fields(options) if options is not None else {} for options in (first, second)]
    plan = planned(step, shapes, changes)
    assert [stage.mesh.ways(stage.deferred) for stage in plan.stages] == ways
    executable = LocalExecutable(PlannedStep(step, plan), submeshes(jax.devices(), plan.stages))
    actual = executable(*executable.shard_args(*args))
    assert_close_to_scale(actual, expected)


def test_gradients_are_all_reduced_only_in_the_update(traced_gpt):
    step, *_ = traced_gpt
    plan = planned(step, [(4,), (4,)], [option_fields(DATA_PARALLEL)] * 2)
    executable = LocalExecutable(PlannedStep(step, plan), submeshes(jax.devices(), plan.stages))
    reduces = {
        task: task_executable.compiled.as_text().count(" all-reduce(")
        for task, task_executable in executable.tasks.items()
    }
    assert all(not count for task, count in reduces.items() if task.phase != "U")
    assert sum(reduces.values()) >= 2


def test_a_loop_that_stores_a_mask_of_the_whole_microbatch_equals_one_device():
    """The mask depends on no example; tasks of a part of the microbatch have its rows alone."""

    def step(params, batch):
        def loss(params):
            def token(carry, x):
                seen, place = carry
                seen = lax.dynamic_update_slice(seen, x[:, None], (0, place, 0))
                is_seen = jnp.broadcast_to(jnp.arange(seen.shape[1]) <= place, seen.shape[:2])
                scores = jnp.where(is_seen, jnp.einsum("btd,bd->bt", seen, x @ params["a"]), -1e9)
                return (seen, place + 1), jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), seen)

            _, tokens = lax.scan(token, (jnp.zeros_like(batch), 0), jnp.swapaxes(batch, 0, 1))
            return jnp.mean((jnp.tanh(tokens @ params["b"]) @ params["c"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, grads), value

    random = np.random.default_rng(0)
    params = {name: random.normal(size=(8, 8)).astype(np.float32) for name in "abc"}
    batch = random.normal(size=(16, 6, 8)).astype(np.float32)
    stages = ManualStageOption(
        [[0], [1]], [(1, 2)] * 2, [(2,)] * 2, [option_fields(DATA_PARALLEL)] * 2
    )
    method = autopar.PipeshardParallel(
        4, num_micro_batches=4, layer_option=AutoLayerOption(2), stage_option=stages
    )
    planned_step = autopar.parallelize(step, method=method)
    assert_close_to_scale(planned_step(params, batch), jax.jit(step)(params, batch))
