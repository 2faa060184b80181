"""Tuning predicts candidates from plans or compiled programs, and measures on virtual devices."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.methods import ManualShardParallel, PlanningMethod
from autopar.tuning import Candidate, Trial, TuningResult, tune
from simulator.hardware.cluster import Cluster


def args(width: int) -> Any:
    return {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}, jax.ShapeDtypeStruct(
        (256, width), jnp.float32
    )


ARGS = args(4096)
SPACE = {"data": [1, 2, 8], "tensor": lambda chosen: [2 // chosen["data"] or 1, 3]}


def step(state: Any, x: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - gradients}


def make(candidate: Candidate, mesh: Any) -> tuple[Any, Any, PlanningMethod]:
    devices = mesh((candidate["data"], candidate["tensor"]))
    if candidate["tensor"] == 3:
        raise ValueError("the axis has size 3")
    specs = ({"w": P(None, "y")}, P("x"))
    return step, ARGS, ManualShardParallel(devices, in_specs=specs, out_specs=specs[0])


@cache
def tuned() -> TuningResult:
    return tune(make, SPACE, Cluster.load("dgx_a100_80"))


def test_the_best_candidate_is_that_of_brute_force() -> None:
    cluster = Cluster.load("dgx_a100_80")
    seconds = {}
    for shape in ((1, 2), (2, 1), (8, 1)):
        method = make({"data": shape[0], "tensor": shape[1]}, lambda shape: shape)[2]
        plan = autopar.plan_step(step, ARGS, method=method, cluster=cluster, mesh_shape=shape)
        seconds[shape] = autopar.simulate(step, ARGS, plan, cluster).makespan
    predicted = {
        tuple(t.candidate.values()): t.predicted_seconds
        for t in tuned().trials
        if t.status == "fits"
    }
    assert predicted == seconds
    assert tuple(tuned().best.values()) == min(seconds, key=lambda shape: seconds[shape])


def test_invalid_candidates_are_kept_with_the_reason() -> None:
    reasons = [trial.reason for trial in tuned().trials if trial.status == "invalid"]
    assert reasons == ["ValueError: the axis has size 3"] * 2 + [reasons[2]]
    assert "24 devices" in reasons[2]
    assert list(tuned().table.columns[:4]) == ["data", "tensor", "status", "predicted_seconds"]


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_larger_than_the_device_memory_does_not_fit(planned: bool) -> None:
    """The compiled program exceeds the memory, or no plan fits (`planned`)."""

    def make_candidate(candidate: Candidate, mesh: Any) -> Any:
        return make(candidate, mesh) if not planned else (step, ARGS, autopar.DataParallel((2,)))

    cluster = Cluster.load("dgx_a100_80")
    small = cluster.model_copy(
        update={"device": cluster.device.model_copy(update={"memory_gb": 0.1, "reserve_gb": 0})}
    )
    (trial,) = tune(make_candidate, {"data": [2], "tensor": [1]}, small).trials
    assert trial.status == "does not fit", trial.reason
    assert "0.1 GB" in trial.reason


def test_the_best_predicted_candidates_are_measured() -> None:
    def make_smaller(candidate: Candidate, mesh: Any) -> Any:
        return step, args(64), make(candidate, mesh)[2]

    result = tune(make_smaller, {"data": [1, 2, 4], "tensor": [1]}, "cpu-virtual", measure=2)
    measured = [trial for trial in result.trials if trial.measured_seconds is not None]
    by_prediction = sorted(result.trials, key=lambda trial: trial.predicted_seconds or 0.0)
    assert {t.candidate["data"] for t in measured} == {
        t.candidate["data"] for t in by_prediction[:2]
    }
    assert result.best in [trial.candidate for trial in measured]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search_by": "random"}, r"search_by is 'random', expected 'exhaustive' or 'coordinate'"),
        ({"measure": 1}, r"the devices here are cpu, not those of 'dgx_a100_80'"),
        ({"space": {"data": [1], "tensor": []}}, r"the space has no candidate"),
        ({"cluster": "dgx_a1000"}, r"dgx_a1000"),
    ],
)
def test_bad_options_are_refused_before_anything_is_tried(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tune(**{"make": make, "space": SPACE, "cluster": "dgx_a100_80", **options})


def test_an_unexpected_exception_of_the_users_function_stops_the_search() -> None:
    def raise_key_error(candidate: Candidate, mesh: Any) -> Any:
        return candidate["datas"]

    with pytest.raises(KeyError):
        tune(raise_key_error, SPACE, "dgx_a100_80")


def test_a_trial_prints_as_one_line() -> None:
    assert (
        str(Trial({"a": 1}, "fits", 0.25, 2 * 10**9, 0.5))
        == "a=1: 250.00 ms, 2.00 GB, measured 500.00 ms"
    )
    assert str(Trial({"a": 1}, "invalid", reason="ValueError: no")) == "a=1: ValueError: no"


def test_a_knob_cannot_have_the_name_of_a_result() -> None:
    with pytest.raises(ValueError, match="knob 'status' has the name of a column of the results"):
        tune(make, SPACE | {"status": [1]}, "dgx_a100_80")


def test_a_candidate_without_a_method_is_invalid() -> None:
    result = tune(lambda *_: (step, ARGS, None), {"data": [1]}, "dgx_a100_80")  # pyright: ignore[reportArgumentType]
    assert [trial.status for trial in result.trials] == ["invalid"]
    assert "method is None, expected a method that plans" in result.trials[0].reason
