"""A run says how many cells are done, and estimates the time left from those that it computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import sweep_progress
from experiments.sources import ROOT
from experiments.sweep_job import Job, Sweep
from experiments.sweep_progress import begin, finish, job_priorities, recorded_seconds

HEADER = b"source,platform,model,size,mesh,strategy,total_time_s\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only item is the time."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def test_outside_of_a_run_there_is_no_progress(tmp_path: Path) -> None:
    assert finish("a", path=tmp_path / "progress") == ""


def test_cells_that_were_up_to_date_count_as_done(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "results/progress"
    begin(188, {"a": 600, "b": 600, "c": 0.1}, path)
    clock[0] += 600
    assert finish("a", path=path) == "186/188, about 10 min left"
    clock[0] += 600
    assert finish("b", path=path) == "187/188, less than a minute left"
    assert finish("c", path=path) == "188/188"


def test_the_estimate_scales_with_the_speed_of_the_machine(
    tmp_path: Path, clock: list[float]
) -> None:
    path = tmp_path / "progress"
    begin(2, {"a": 6000, "b": 600}, path)
    clock[0] += 3 * 6000
    assert finish("a", path=path) == "1/2, about 30 min left"


def test_the_first_cell_of_a_run_does_not_decide_its_estimate(
    tmp_path: Path, clock: list[float]
) -> None:
    """5 seconds of imports before a cell of a second do not make an estimate of 50 minutes."""
    path = tmp_path / "progress"
    begin(2, {"a": 1, "b": 600}, path)
    clock[0] += 5
    assert finish("a", path=path) == "1/2, about 11 min left"


def test_cells_of_a_stopped_run_count_as_done_but_not_for_the_speed(
    tmp_path: Path, clock: list[float]
) -> None:
    path = tmp_path / "progress"
    begin(3, {"a": 6000, "b": 6000, "c": 600}, path)
    finish("a", computed=False, path=path)
    clock[0] += 6000
    assert finish("b", path=path) == "2/3, about 10 min left"


def test_seconds_come_from_the_first_table_that_exists(tmp_path: Path) -> None:
    header = HEADER.decode()
    here, recorded = tmp_path / "here.csv", tmp_path / "recorded.csv"
    recorded.write_text(f"{header}simulated,dgx,gpt,125M,2x4,shard,12.5\npaper,dgx,gpt,1,1,a,\n")
    assert recorded_seconds(here, recorded) == {"simulated/dgx/gpt-125M/2x4/shard": 12.5}
    here.write_text(header)
    assert recorded_seconds(here, recorded) == {}
    assert recorded_seconds() == {}


@pytest.mark.parametrize(
    "table",
    [b"\xff\xfe\x00", b"junk\n1\n", b"total_time_s\n1\n", HEADER + b"a,b,c,d,1,e,fast\n"],
)
def test_a_table_that_cannot_be_read_has_no_seconds(tmp_path: Path, table: bytes) -> None:
    here, recorded = tmp_path / "here.csv", tmp_path / "recorded.csv"
    recorded.write_bytes(HEADER + b"a,b,c,d,1,e,2.5\na,b,c,d,1,f,nan\na,b,c,d,1,g,-1\n")
    here.write_bytes(table)
    assert recorded_seconds(here, recorded) == {"a/b/c-d/1/e": 2.5}


def test_the_first_figure_comes_first_and_then_the_longest_job() -> None:
    def job(model: str, mesh: int, *strategies: str) -> Job:
        return Job("simulated", model, "s", {}, "dgx", (mesh,), strategies)

    jobs = [job("mlp", 1, "a"), job("mlp", 2, "a", "b"), job("gpt", 1, "a"), job("gpt", 2, "a")]
    sweep = Sweep({job.name: job for job in jobs}, {}, {}, {}, "")
    seconds = {"simulated/dgx/gpt-s/2/a": 1000.0, "simulated/dgx/gpt-s/1/a": 3.0}
    priorities = job_priorities(sweep, seconds)
    assert sorted(priorities, key=priorities.__getitem__, reverse=True) == [
        "simulated/dgx/mlp-s/2",
        "simulated/dgx/mlp-s/1",
        "simulated/dgx/gpt-s/2",
        "simulated/dgx/gpt-s/1",
    ]


def test_lines_of_several_processes_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    begin(3, {"a": 1, "b": 1, "c": 1}, path)
    for cell in "ab":
        with path.open("a") as file:
            file.write(json.dumps({"cell": cell, "computed": True}) + "\n")
    assert finish("c", path=path) == "3/3"
    assert sweep_progress.PROGRESS.name == "progress.jsonl"


def test_a_run_whose_reader_has_gone_goes_on() -> None:
    program = (
        "from experiments.sweep_progress import say\n"
        "import sys\n"
        "for _ in range(3): say('a line')\n"
        "print('all said', file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "all said\n")
