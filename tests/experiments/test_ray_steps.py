"""Overheads of hosts are fitted to some models, predict others, and make a cluster file."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.measurements.host_timing import StepSeconds, medians
from experiments.validation.ray_steps import (
    CASES,
    SHAPES,
    CompiledCase,
    MeasuredCase,
    calibrated,
    rows_of,
    write_calibrated,
)
from simulator.hardware.cluster import Cluster

TABLE = Path(__file__).parents[2] / "results/tables/hosts.csv"


def test_what_was_held_out_is_predicted_to_a_fifth():
    table = pd.read_csv(TABLE)
    held_out = table[table["case"].str.endswith("(held out)")]
    errors = held_out[held_out["quantity"].str.startswith("error_")]
    assert {
        "GPT, 4 stages, 4 microbatches (held out)",
        "GPT, 2 stages, 4 microbatches (held out)",
    } <= {*errors["case"]}
    assert set(zip(errors["hosts"], errors["devices_per_host"], strict=True)) == {(2, 4), (4, 2)}
    assert errors["value"].abs().max() < 0.2
    within = (
        held_out[["case", "hosts"]]
        .apply(tuple, axis=1)
        .isin(set(zip(errors["case"], errors["hosts"], strict=True)))
    )
    steps = held_out[within].pivot_table(
        index=["case", "hosts"], columns="quantity", values="value"
    )
    assert len(steps) == 3  # with 2 stages on 4 hosts a stage spans two, which is not predicted
    for role in ("shipped", "fitted_here"):
        found = steps[f"predicted_seconds_{role}"] / steps["seconds"] - 1
        assert found.values == pytest.approx(steps[f"error_{role}"].values, abs=2e-3)


def test_nothing_is_fitted_to_what_is_predicted():
    models = {
        role: {type(case.model) for case in CASES if case.role == role}
        for role in ("fitted", "held out")
    }
    assert models["fitted"].isdisjoint(models["held out"])
    assert any(case.stages == 4 for case in CASES if case.role == "held out")
    assert (2, 4) in SHAPES


def test_medians_are_taken_number_by_number():
    assert medians(
        [StepSeconds(1, 5, 9), StepSeconds(2, 4, 8), StepSeconds(3, 6, 7)]
    ) == StepSeconds(2, 5, 8)


@pytest.mark.slow
def test_what_is_fitted_is_a_cluster_file_that_predicts(tmp_path):
    case = next(case for case in CASES if case.role == "fitted")
    compiled = CompiledCase(case)
    tasks = {run.task: 1e-3 for run in compiled.executable.job.calls}  # pyright: ignore
    step = StepSeconds(0.06, 0.07, 0.005)
    found = [MeasuredCase(compiled, shape, step, step, tasks) for shape in SHAPES for _ in range(2)]
    transfers = [(1e3, 1e-3), (1e6, 2e-3), (1e8, 0.1)]
    cluster = calibrated({"within a host": transfers, "between hosts": transfers}, found)
    write_calibrated(tmp_path / "here.yaml", cluster, "a test")
    read = Cluster.load(tmp_path / "here.yaml")
    assert read.processes is not None
    assert read.source == "a test"
    assert found[0].step().predicted(read) == pytest.approx(
        found[0].step().predicted(cluster), rel=0.02
    )
    rows = {row.quantity: row.value for row in rows_of(found[0], {"here": read})}
    assert rows["tasks_seconds"] == pytest.approx(1e-3 * len(compiled.executable.job.calls))
    assert rows["error_here"] == pytest.approx(rows["predicted_seconds_here"] / 0.06 - 1)
    assert abs(rows["error_here"]) < 0.2
