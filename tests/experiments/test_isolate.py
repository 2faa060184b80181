"""A cell that fails gets a result with the reason, and the other cells are still computed."""

import json
from pathlib import Path

import pytest

from experiments import isolate
from experiments.cells import Cell, compute_cells, read_cell, write_cell
from experiments.sweep_job import Job

JOB = Job(
    "mlp",
    "tiny",
    {"dim": 4, "num_layers": 2, "batch_size": 4},
    "p3.16xlarge",
    (2, 4),
    ("data", "zero2", "shard"),
)


def test_a_job_comes_back_from_json() -> None:
    assert Job.from_json(JOB.to_json()) == JOB
    assert JOB.name == "p3.16xlarge/mlp-tiny/2x4"


def test_an_exception_is_reported_by_its_message() -> None:
    errors = (
        "a warning\nTraceback (most recent call last):\n  File 'x.py', line 1\n    f()\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'x.py', line 2\n    g()\nautopar.plan.PlanError: batch of 15\n  not divisible\n"
    )
    assert isolate.reason_of(1, errors) == "autopar.plan.PlanError: batch of 15\n  not divisible"


def test_a_killed_process_is_reported_by_its_signal_and_last_words() -> None:
    assert (
        isolate.reason_of(-6, "F0000 hlo.cc:12] Check failed\n")
        == "killed by SIGABRT: F0000 hlo.cc:12] Check failed"
    )
    assert isolate.reason_of(-9, "") == "killed by SIGKILL"


def test_a_process_that_says_nothing_is_reported_by_its_status() -> None:
    assert isolate.reason_of(3, "") == "exit status 3"


def test_a_cell_that_takes_the_process_with_it_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str]) -> tuple[int, str]:
        job, results = Job.from_json(command[3]), Path(command[4])
        for strategy in ("data", "zero2", "shard"):
            if read_cell(results, strategy).reason.startswith("no result"):
                if strategy == "zero2":
                    return -11, "Segmentation fault"
                write_cell("simulate", job, results, strategy, Cell(step_time_s=0.5))
        return 0, ""

    monkeypatch.setattr(isolate, "_run", run)
    isolate.main("simulate", JOB.to_json(), str(tmp_path / "cells"))
    results = {name: read_cell(tmp_path / "cells", name) for name in JOB.strategies}
    assert results == {
        "data": Cell(step_time_s=0.5),
        "zero2": Cell("failed", "killed by SIGSEGV: Segmentation fault"),
        "shard": Cell(step_time_s=0.5),
    }
    assert capsys.readouterr().out.splitlines() == [
        "simulate p3.16xlarge mlp-tiny on 2x4      data             " + "   500.00 ms",
        "simulate p3.16xlarge mlp-tiny on 2x4      zero2            FAILED killed by SIGSEGV: Segmentation fault",
        "simulate p3.16xlarge mlp-tiny on 2x4      shard            " + "   500.00 ms",
    ]


def test_a_cell_whose_planning_failed_fails_for_the_same_reason(tmp_path: Path) -> None:
    plans, results = tmp_path / "plans", tmp_path / "cells"
    plans.mkdir()
    results.mkdir()
    write_cell("plan", JOB, plans, "data", Cell(planning_time_s=0.25))
    write_cell("plan", JOB, plans, "zero2", Cell("failed", "no rule for sort"))
    write_cell("plan", JOB, plans, "shard", Cell())
    computed = []

    def compute(strategy: str) -> Cell:
        computed.append(strategy)
        return Cell(step_time_s=1.0)

    compute_cells("simulate", JOB, results, compute, plans)
    assert computed == ["data", "shard"]
    assert read_cell(results, "data") == Cell(step_time_s=1.0, planning_time_s=0.25)
    assert read_cell(results, "zero2") == Cell("failed", "planning: no rule for sort")
    assert json.loads((results / "shard.json").read_text())["planning_time_s"] is None


def test_the_last_words_before_an_abort_are_not_its_stack_trace() -> None:
    errors = "F0001 rendezvous.cc: Termination timeout exceeded\n*** Check failure stack trace: ***\n    @     0x7f (unknown)\n\n"
    assert (
        isolate.reason_of(-6, errors)
        == "killed by SIGABRT: F0001 rendezvous.cc: Termination timeout exceeded"
    )
