"""A cell that fails gets a result with the reason, and the other cells are still computed."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import isolate
from experiments.cells import Cell, compute_cells, read_cell, read_job, remaining, write_cell
from experiments.sweep_job import Job

ROOT = Path(__file__).parents[2]

JOB = Job(
    "simulated",
    "mlp",
    "tiny",
    {"dim": 4, "num_layers": 2, "batch_size": 4},
    "p3.16xlarge",
    (2, 4),
    ("data", "zero2", "shard"),
)


def test_a_job_comes_back_from_json() -> None:
    assert Job.from_json(JOB.to_json()) == JOB
    assert JOB.name == "simulated/p3.16xlarge/mlp-tiny/2x4"


def test_an_exception_is_reported_by_its_message() -> None:
    errors = (
        "a warning\n"
        "Traceback (most recent call last):\n  File 'x.py', line 1\n    f()\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'x.py', line 2\n    g()\n"
        "autopar.plan.PlanError: batch of 15\n  not divisible\n"
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


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for the results of the job, below an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / JOB.name


def script(*results: Cell | tuple[int, str]) -> Callable[[list[str]], tuple[int, str]]:
    """Return a stand-in for the process of a script, which computes or ends as `results` say."""
    left = list(results)

    def run(command: list[str]) -> tuple[int, str]:
        job, directory = Job.from_json(command[3]), Path(command[4])
        for strategy in remaining(job, directory):
            match left.pop(0):
                case Cell() as cell:
                    write_cell(job, directory, strategy, cell)
                case end:
                    return end
        return 0, ""

    return run


def test_a_cell_that_takes_the_process_with_it_loses_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell(step_time_s=0.5, memory_bytes_per_device=2**31)
    monkeypatch.setattr(isolate, "run_script", script(cell, (-11, "Segmentation fault"), cell))
    isolate.main(JOB.to_json(), str(directory), "code")
    assert {name: read_cell(directory, name) for name in JOB.strategies} == {
        "data": cell,
        "zero2": Cell("failed", "killed by SIGSEGV: Segmentation fault"),
        "shard": cell,
    }
    assert not directory.with_name("2x4.unfinished").exists()
    place = "simulated mlp-tiny      p3.16xlarge  2x4  "
    assert capsys.readouterr().out.splitlines() == [
        place + "data                   500.00 ms     2.000 GiB  ok",
        place + "zero2              FAILED killed by SIGSEGV: Segmentation fault",
        place + "shard                  500.00 ms     2.000 GiB  ok",
    ]


@pytest.mark.parametrize("end", [-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP])
def test_a_stopped_job_goes_on_where_it_was(
    directory: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    first, second = Cell(step_time_s=1.0), Cell(step_time_s=2.0)
    monkeypatch.setattr(isolate, "run_script", script(first, (end, "")))
    with pytest.raises(SystemExit, match="stopped"):
        isolate.main(JOB.to_json(), str(directory), "code")
    assert not directory.exists()
    monkeypatch.setattr(isolate, "run_script", script(second, second))
    isolate.main(JOB.to_json(), str(directory), "code")
    assert [read_cell(directory, name) for name in JOB.strategies] == [first, second, second]


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        (JOB, ["changed code"]),
        (JOB, ["code", "settings"]),
        (replace(JOB, sizes=dict(JOB.sizes) | {"dim": 8}), ["code"]),
    ],
)
def test_a_stopped_job_starts_anew_if_what_it_depends_on_changed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, job: Job, arguments: list[str]
) -> None:
    monkeypatch.setattr(isolate, "run_script", script(Cell(step_time_s=1.0), (-2, "")))
    with pytest.raises(SystemExit):
        isolate.main(JOB.to_json(), str(directory), "code")
    cell = Cell(step_time_s=2.0)
    monkeypatch.setattr(isolate, "run_script", script(cell, cell, cell))
    isolate.main(job.to_json(), str(directory), *arguments)
    assert [read_cell(directory, name) for name in JOB.strategies] == [cell] * 3
    assert read_job(directory) == job


def test_a_job_whose_run_was_killed_ends_with_its_script(tmp_path: Path) -> None:
    """The run is a sleeping process; so is the script, which stands first on the path."""
    package = tmp_path / "experiments/scripts"
    package.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    (package / "simulate_cells.py").write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    for module in ("__init__", "isolate", "cells", "sweep_job", "sweep_progress"):
        shutil.copy(ROOT / "experiments" / f"{module}.py", tmp_path / "experiments")
    with subprocess.Popen(["sleep", "60"]) as run:
        name = f"{socket.gethostname()}:{run.pid}"
        environment = os.environ | {isolate.SWEEP_PROCESS: name}
        command = [sys.executable, "-m", "experiments.isolate", JOB.to_json(), "cells", "code"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:
            while not (pid_file.exists() and pid_file.read_text()):
                assert job.poll() is None
                time.sleep(0.05)
            run.kill()
            run.wait()
            assert job.wait(timeout=60) != 0
    script_process = Path("/proc", pid_file.read_text(), "stat")
    assert not script_process.exists() or script_process.read_text().split()[2] == "Z"


@pytest.mark.parametrize("run", ["", "another-host:1"])
def test_a_job_on_another_host_than_the_run_goes_on(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(isolate.SWEEP_PROCESS, run)
    before, handler = threading.active_count(), signal.getsignal(signal.SIGTERM)
    isolate.end_with_run()
    signal.signal(signal.SIGTERM, handler)
    assert threading.active_count() == before


def test_a_result_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_cell(JOB, tmp_path, "data", Cell(step_time_s=1.0))
    assert list(remaining(JOB, tmp_path)) == list(JOB.strategies)


def test_each_cell_has_the_seconds_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=2.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    compute_cells(JOB, tmp_path, lambda strategy: Cell(reason=strategy))
    assert [read_cell(tmp_path, name) for name in JOB.strategies] == [
        Cell(reason=name, total_time_s=2.0) for name in JOB.strategies
    ]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(step_time_s=0.0123), "     12.30 ms  ok"),
        (
            Cell("out_of_memory", "needs 4 GiB", 0.5, None, 2**32),
            "    500.00 ms     4.000 GiB  does not fit",
        ),
        (Cell("failed", "ValueError: odd\nin two lines"), "FAILED ValueError: odd"),
        (Cell("failed", ""), "FAILED "),
        (Cell("failed", "x" * 6000), f"FAILED {'x' * 200}..."),
    ],
)
def test_a_cell_is_one_short_line(cell: Cell, text: str) -> None:
    assert str(cell) == text


def test_the_last_words_before_an_abort_are_not_its_stack_trace() -> None:
    errors = (
        "F0001 rendezvous.cc: Termination timeout exceeded\n"
        "*** Check failure stack trace: ***\n    @     0x7f (unknown)\n\n"
    )
    assert (
        isolate.reason_of(-6, errors)
        == "killed by SIGABRT: F0001 rendezvous.cc: Termination timeout exceeded"
    )
