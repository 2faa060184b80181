"""The sweep's GPT under directives trains as it does on one device, with every backend."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import autopar
from autopar.devices import device_mesh
from autopar.directives import DirectiveError, build
from autopar.directives.build_model import Backend
from autopar.model_schedules import Knobs
from autopar.testing import assert_allclose
from experiments.gpt_directives import (
    megatron,
    schedule_gpt,
    scheduled_step,
    split_attention,
    train_step,
)
from experiments.local_steps import initial_args, largest_difference
from experiments.models import GPT, MLP
from experiments.planned_strategies import SCHEDULED
from simulator.hardware.cluster import Cluster
from tests.tiers import slow

MODEL = GPT(
    num_layers=1, hidden_size=32, num_heads=4, sequence_length=8, vocab_size=64, batch_size=4
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directives", "backend"), [(megatron, "manual"), (split_attention, "auto")]
)
def test_a_scheduled_gpt_trains_as_on_one_device(directives: object, backend: Backend) -> None:
    key = jax.random.key(0)
    state, batch = MODEL.init_state(key), MODEL.make_batch(key)
    expected, loss = jax.jit(MODEL.train_step)(state, batch)
    sch = schedule_gpt(MODEL, 4)
    assert callable(directives)
    directives(sch)
    built = build(sch, backend)
    step = autopar.parallelize(train_step(MODEL, built), method=built.method, donate_argnums=())
    updated, found = step(state, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    # Adam's first step is the sign of the gradient, even of one that is only rounding.
    assert_allclose(updated.params, expected.params, atol=2e-3)
    kernel = updated.params["params"]["block_0"]["attention"]["qkv"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 24)


@pytest.mark.parametrize("name", slow(*SCHEDULED))
def test_a_plan_for_gpus_that_are_not_here_is_predicted_and_runs_here(name: str) -> None:
    """Megatron has two all_reduces per block and direction, and one for the embedding."""
    cluster, strategy = Cluster.load("dgx_a100_80"), SCHEDULED[name]
    plan = strategy.plan(MODEL, (2,), cluster)
    timeline = strategy.predict(MODEL, (2,), plan, cluster).timeline
    assert timeline.makespan > 0
    assert timeline.memory[0].total > 0
    if name == "schedule_megatron":
        assert sum(span.category == "all_reduce" for span in timeline.spans) >= 5
    args = initial_args(MODEL)
    runnable = strategy.prepare(MODEL, (2,), plan, args)
    assert (
        largest_difference(runnable.step(*runnable.args), jax.jit(MODEL.train_step)(*args)) < 2e-3
    )


def test_schedules_are_for_gpts_whose_heads_the_devices_divide() -> None:
    strategy = SCHEDULED["schedule_megatron"]
    assert [
        mesh for mesh in ((1,), (4,), (8,), (2, 4), (4, 8)) if strategy.runs_on(MODEL, mesh)
    ] == [(4,), (2, 4)]
    assert not strategy.runs_on(replace(MODEL, scan_layers=True), (4,))
    with pytest.raises(
        ValueError, match="schedules are written for GPT; given MLP, use an automatic strategy"
    ):
        strategy.plan(MLP(dim=8, num_layers=2, batch_size=8), (4,), Cluster.load("dgx_a100_80"))


def test_parameters_of_stacked_layers_are_pinned_for_the_planner_and_not_split_by_hand() -> None:
    model = replace(MODEL, num_layers=2, scan_layers=True)
    sch = schedule_gpt(model, AbstractMesh((4,), ("x",)))
    sch["blocks/attention/qkv"].shard("kernel", axis=2)
    built = build(sch, "auto")
    step, args = train_step(model, built), model.abstract_args()
    plan = autopar.plan_step(step, args, method=built.method, cluster="dgx_a100_80")
    specs = {value.path: value.spec for value in plan.stages[0].inputs}
    assert specs["0/params/params/blocks/attention/qkv/kernel"] == ((), (), ("x",))
    with pytest.raises(
        DirectiveError, match=r"blocks/attention/qkv/kernel, which is split .*, goes into scan"
    ):
        build(sch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ((1, 2), Knobs(pipeline_stages=2)),
        ((2, 2), Knobs(vocabulary_parallel=True, sequence_parallel=True)),
    ],
    ids=["stages with tensor parallelism", "data and tensor parallelism"],
)
def test_with_microbatches_a_scheduled_gpt_trains_as_on_one_device(
    shape: tuple[int, int], knobs: Knobs
) -> None:
    model, key, sgd = replace(MODEL, num_layers=2), jax.random.key(0), optax.sgd(1.0)
    state, batch = model.init_state(key), model.make_batch(key)
    # With Adam the first step would be the sign of the gradient.
    state = state.replace(tx=sgd, opt_state=sgd.init(state.params))
    expected, loss = jax.jit(model.train_step)(state, batch)
    step, _, method = scheduled_step(model, device_mesh, shape, knobs, num_micro_batches=2)
    updated, found = autopar.parallelize(step, method=method, donate_argnums=())(state, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_allclose(updated.params, expected.params, rtol=1e-4, atol=1e-5)
