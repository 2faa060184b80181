"""Analytic programs have the seconds and bytes of the plan, and agree with XLA's compilation."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest

import autopar
import simulator
from experiments.models import GPT
from simulator import Cluster, load_program, prediction_of, save_program, simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.description import ClusterError
from tests.steps import mlp_args, mlp_step
from tests.tiers import tiers

MODEL = GPT(
    num_layers=2,
    hidden_size=1024,
    num_heads=16,
    sequence_length=512,
    vocab_size=25600,
    batch_size=32,
    compute_dtype="float16",
)
A100 = Cluster.load("dgx_a100_80")


def step(state: Any, batch: Any) -> Any:
    return MODEL.train_step(state, batch, autopar.value_and_grad)


def pipeline(schedule: str, **options: Any) -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(
        num_micro_batches=4,
        layer_option=autopar.AutoLayerOption(2),
        pipeline_schedule=schedule,
        **options,
    )


METHODS = {
    "shard": (autopar.ShardParallel(), (2, 4)),
    "accumulated": (autopar.ShardParallel(num_micro_batches=2), (8,)),
    "zero2": (autopar.Zero2Parallel(num_micro_batches=2), (8,)),
    "data": (autopar.DataParallel(), (8,)),
    "1f1b": (pipeline("1f1b"), (8,)),
    "zero_bubble_h1": (pipeline("zero_bubble_h1"), (8,)),
}


@cache
def plan(name: str) -> autopar.Plan:
    method, shape = METHODS[name]
    return autopar.plan_step(
        step, MODEL.abstract_args(), method=method, cluster=A100, mesh_shape=shape
    )


@cache
def predicted(name: str, fidelity: Any = "analytic") -> Timeline:
    return autopar.simulate(step, MODEL.abstract_args(), plan(name), A100, fidelity=fidelity)


@pytest.mark.parametrize(
    "name", tiers(["1f1b", "shard", "accumulated", "zero2", "data", "zero_bubble_h1"])
)
def test_time_and_memory_are_those_of_the_plan(name):
    timeline, planned = predicted(name), plan(name)
    is_whole_step = planned.schedule.is_whole_step
    # the plan of a pipeline counts one transfer at a time, and no gather on the receiving mesh
    tolerance = 1e-6 if is_whole_step else 0.08
    assert timeline.makespan == pytest.approx(planned.predicted_seconds, rel=tolerance)
    # the plan of a pipeline counts values that half a backward pass reads through all of it
    tolerance = 0.01 if is_whole_step else 0.05
    peak = max(use.total for use in timeline.memory)
    assert peak == pytest.approx(planned.predicted_bytes, rel=tolerance)
    assert all(sum(use.roles.values()) == use.total for use in timeline.memory)


@pytest.mark.parametrize(
    ("name", "fidelity"),
    [
        ("shard", "analytic"),
        pytest.param("accumulated", "analytic", marks=pytest.mark.slow),
        pytest.param("shard", "compiled", marks=pytest.mark.slow),
    ],
)
def test_memory_of_one_program_rises_in_the_forward_and_falls_in_the_backward_pass(name, fidelity):
    timeline = predicted(name, fidelity)
    [levels], [use] = timeline.levels, timeline.memory
    times = [second for second, _ in levels]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] <= timeline.makespan
    totals = [sum(level.values()) for _, level in levels]
    assert max(totals) == use.total
    assert levels[totals.index(max(totals))][1] == use.roles
    saved = [level.get("activations", 0) for _, level in levels]
    peak = saved.index(max(saved))
    assert len({*saved[:peak]}) > 5
    assert len({*saved[peak:]}) > 5
    for role in ("parameters", "optimizer"):
        assert {level[role] for _, level in levels} == {use.roles[role]}
    assert saved[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "accumulated", "zero_bubble_h1"])
def test_time_memory_and_flops_agree_with_compilation(name):
    analytic, compiled = predicted(name), predicted(name, "compiled")
    assert analytic.makespan == pytest.approx(
        compiled.makespan, rel=0.06 if name == "zero_bubble_h1" else 0.05
    )
    for mine, theirs in zip(analytic.memory, compiled.memory, strict=True):
        assert mine.total == pytest.approx(theirs.total, rel=0.05)
    assert sum(analytic.flops.values()) == pytest.approx(sum(compiled.flops.values()), rel=0.01)
    a, b = prediction_of(analytic, A100), prediction_of(compiled, A100)
    assert sum(a.communication.values()) == pytest.approx(sum(b.communication.values()), rel=0.25)
    assert (a.forward, a.backward) == pytest.approx((b.forward, b.backward), rel=0.2)
    assert max(a.unattributed, b.unattributed) < 1e-3 * b.seconds


@pytest.mark.parametrize("fidelity", tiers(["analytic", "compiled"]))
def test_communication_is_split_by_mesh_axis(fidelity):
    timeline = predicted("shard", fidelity)
    prediction = prediction_of(timeline, A100)
    assert {"x", "y"} <= set(prediction.communication) <= {"x", "y", "x,y"}
    of_kinds = [s.seconds for s in timeline.spans if s.stream == "communication"]
    assert sum(prediction.communication.values()) == pytest.approx(sum(of_kinds))
    assert set(prediction_of(predicted("1f1b", fidelity), A100).communication) >= {"x", "pipeline"}


def test_a_plan_from_a_file_will_do_and_the_program_goes_into_one(tmp_path):
    plan("1f1b").save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.simulate(step, MODEL.abstract_args(), loaded, A100, fidelity="analytic")
    assert again.makespan == predicted("1f1b").makespan
    program = autopar.compile_step(step, MODEL.abstract_args(), loaded, A100, fidelity="analytic")
    save_program(program, tmp_path / "program.json")
    assert simulate(load_program(tmp_path / "program.json"), A100).makespan == again.makespan
    with pytest.raises(
        ClusterError,
        match=r"on cluster 'dgx_a100_80', which are not those of 'dgx_h100'.*fidelity='compiled'",
    ):
        simulate(load_program(tmp_path / "program.json"), Cluster.load("dgx_h100"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulated", "1f1b"])
def test_recomputation_is_a_phase_of_its_own(name):
    model, (method, shape) = replace(MODEL, remat=True), METHODS[name]

    def step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch, autopar.value_and_grad)

    plan_with_remat = autopar.plan_step(
        step, model.abstract_args(), method=method, cluster=A100, mesh_shape=shape
    )
    prediction = autopar.predict(
        step, model.abstract_args(), plan_with_remat, A100, fidelity="analytic"
    )
    assert prediction.mfu < 0.9 * prediction.hfu
    assert 0.3 * prediction.forward < prediction.recompute < prediction.forward
    assert prediction.backward > prediction.forward


@pytest.mark.parametrize("name", tiers(["1f1b", "zero2", "data"]))
def test_model_flops_do_not_depend_on_the_plan(name):
    tokens = MODEL.batch_size * MODEL.sequence_length
    prediction = autopar.predict(
        step, MODEL.abstract_args(), plan(name), A100, fidelity="analytic", tokens=tokens
    )
    assert prediction.timeline == predicted(name)
    assert prediction.seconds == predicted(name).makespan
    width, rows = MODEL.hidden_size, MODEL.batch_size * MODEL.sequence_length
    weights = MODEL.num_layers * 12 * width**2 + width * MODEL.vocab_size
    attention = MODEL.num_layers * 2 * width * MODEL.sequence_length
    assert prediction.model_flops == pytest.approx(6 * rows * (weights + attention), rel=0.01)
    assert 0 < prediction.mfu <= prediction.hfu * (1 + 1e-9) < 1
    assert (prediction.examples, prediction.examples_per_s) == (
        MODEL.batch_size,
        MODEL.batch_size / prediction.seconds,
    )
    program = autopar.compile_step(
        step, MODEL.abstract_args(), plan(name), A100, fidelity="analytic"
    )
    assert simulator.predict(program, A100).row()["mfu"] == prediction.mfu


def test_unknown_fidelities_manual_plans_and_small_clusters_are_refused():
    args = MODEL.abstract_args()
    with pytest.raises(ValueError, match="fidelity is 'exact', expected 'compiled' or 'analytic'"):
        predicted("shard", "exact")
    manual = autopar.plan_step(
        step,
        args,
        method=autopar.ManualShardParallel(pins={"*/kernel": jax.P(None, "x")}),
        cluster=A100,
    )
    with pytest.raises(autopar.PlanError, match=r"nothing inside .* Compile the step"):
        autopar.simulate(step, args, manual, A100, fidelity="analytic")
    for name in ("shard", "1f1b"):
        with pytest.raises(ClusterError, match="it has 4"):
            autopar.simulate(step, args, plan(name), A100.first_devices(4), fidelity="analytic")


def test_a_pipeline_that_returns_a_number_beside_its_state_is_predicted():
    def numbered_step(state: Any, batch: Any) -> Any:
        return *mlp_step(state, batch), 3.0

    def seconds(fun: Any) -> float:
        args = jax.eval_shape(mlp_args)
        method = pipeline("1f1b")
        planned = autopar.plan_step(fun, args, method=method, cluster=A100, mesh_shape=(2,))
        return autopar.predict(fun, args, planned, A100, fidelity="analytic").seconds

    assert seconds(numbered_step) == pytest.approx(seconds(mlp_step))
