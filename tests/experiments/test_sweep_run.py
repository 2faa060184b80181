"""A run prints a line per failure, says if there is nothing to do, and excludes another run."""

import logging
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from experiments.isolate import SWEEP_PROCESS
from experiments.sweep_job import Job, Sweep
from experiments.sweep_run import SweepRun

JOBS = [
    Job("simulated", "mlp", "s", {}, "dgx", (1,), ("shard", "zero2")),
    Job("measured", "mlp", "s", {}, "cpu", (1,), ("shard",)),
]
SWEEP = Sweep({job.name: job for job in JOBS}, {}, {}, {}, "")


def workflow(
    *needed: tuple[str, str, int], up_to_date: Any = (), targets: Any = (), **shown: Any
) -> Any:
    """Return a workflow with two cores whose jobs to run have these rules, outputs and threads."""
    needed_jobs, other_jobs = _jobs(needed), _jobs(up_to_date)
    settings = {"dryrun": False, "verbose": False, "quiet": None} | shown
    return SimpleNamespace(
        cores=2,
        is_main_process=True,
        output_settings=SimpleNamespace(**settings),
        dag_settings=SimpleNamespace(targets=targets),
        dag=SimpleNamespace(needrun_jobs=lambda: needed_jobs, jobs=[*needed_jobs, *other_jobs]),
    )


def _jobs(jobs: Any) -> Any:
    return [
        SimpleNamespace(rule=SimpleNamespace(name=rule), output=[output], threads=threads)
        for rule, output, threads in jobs
    ]


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty directory; restore handlers of logs and signals."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".snakemake").mkdir()
    monkeypatch.setenv(SWEEP_PROCESS, "")
    monkeypatch.setattr(logger, "handlers", [])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def log(level: int, message: str, **fields: Any) -> None:
    """Log a message with the fields of a record of Snakemake."""
    logger.handle(logger.makeRecord("", level, "", 0, message, (), None, extra=fields))


def job_error(log_file: str) -> None:
    """Log that a job failed, as Snakemake does, in several records."""
    fields = {
        "rule_name": "write_tables",
        "output": ["results/tables/cells.csv"],
        "log": [log_file],
    }
    log(logging.ERROR, "RuleException:\nCalledProcessError in file x.smk, line 3:\n" + 6000 * "x")
    log(logging.ERROR, "Error in rule write_tables", event=LogEvent.JOB_ERROR, **fields)
    log(logging.ERROR, "Exiting because a job execution failed. Look above for error messages")


def test_nothing_to_do_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    SweepRun(workflow(), SWEEP, {})
    log(logging.INFO, "Building DAG of jobs...")
    log(logging.INFO, NOTHING_TO_BE_DONE_MSG)
    assert capsys.readouterr().out == (
        "Nothing to do: 3 cells, tables and figures are up to date."
        " --forceall computes everything again.\n"
    )


def test_a_run_of_some_targets_counts_their_cells_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [("simulate_cells", "results/cells/simulated/dgx/mlp-s/1", 1)]
    run = SweepRun(workflow(*jobs, targets={"figure.svg"}), SWEEP, {})
    run.start()
    run.succeed()
    log(logging.INFO, NOTHING_TO_BE_DONE_MSG)
    first, _, last = capsys.readouterr().out.splitlines()
    assert first == "2 cells to compute. Ctrl-C stops; the same command goes on."
    assert last == (
        "Nothing to do: what was asked for is up to date. --forceall computes everything again."
    )


def test_a_failed_job_is_one_line_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SweepRun(workflow(), SWEEP, {})
    (tmp_path / "tables.log").write_text("Traceback:\n  ...\nKeyError: 'mesh'\n\n")
    job_error("tables.log")
    job_error("none.log")
    assert capsys.readouterr().out.splitlines() == [
        "FAILED write_tables results/tables/cells.csv: KeyError: 'mesh' (log: tables.log)",
        "FAILED write_tables results/tables/cells.csv: no message (log: none.log)",
    ]


def test_other_errors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    SweepRun(workflow(), SWEEP, {})
    log(logging.ERROR, "MissingInputException in rule all")
    assert capsys.readouterr().out == "MissingInputException in rule all\n"


@pytest.mark.parametrize("shown", [{"dryrun": True}, {"verbose": True}])
def test_a_dry_run_prints_what_snakemake_prints(shown: dict[str, bool]) -> None:
    handler = logging.NullHandler()
    handler.name = "DefaultStreamHandler"
    logger.handlers.append(handler)
    SweepRun(workflow(**shown), SWEEP, {})
    assert logger.handlers == [handler]
    SweepRun(workflow(), SWEEP, {})
    assert handler not in logger.handlers


def test_a_run_starts_with_what_it_has_to_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        ("simulate_cells", "results/cells/simulated/dgx/mlp-s/1", 1),
        ("write_tables", "results/tables/cells.csv", 1),
    ]
    seconds = {"simulated/dgx/mlp-s/1/shard": 30.0}
    measured = [("measure_cells", "results/cells/measured/cpu/mlp-s/1", 2)]
    run = SweepRun(workflow(*jobs, up_to_date=measured), SWEEP, seconds)
    run.start()
    run.succeed()
    first, last = capsys.readouterr().out.splitlines()
    assert first == ("2 cells to compute, 1 up to date. Ctrl-C stops; the same command goes on.")
    assert last.startswith("Done in 0.0 min. Tables are in results/tables")
    assert (
        '"simulated/dgx/mlp-s/1/shard": 15.0' in (tmp_path / "results/progress.jsonl").read_text()
    )


def test_a_stopped_run_ends_its_jobs_alone_and_reports_no_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        run = SweepRun(workflow(), SWEEP, {})
        run.start()
        with subprocess.Popen(["sleep", "60"]) as job:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            assert job.wait() == -signal.SIGTERM
        assert other.poll() is None
        other.kill()
    job_error("none.log")
    run.fail()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Stopped. Results so far are kept; the same command goes on from there."
    ]


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    first, second = (SweepRun(workflow(), SWEEP, {}) for _ in range(2))
    first.start()
    with pytest.raises(SystemExit, match=f"another run of the sweep is writing to {tmp_path}"):
        second.start()
    first.succeed()
    second.start()
    second.fail()


def test_a_second_signal_of_a_stopped_run_raises_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = SweepRun(workflow(), SWEEP, {})
    run.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    run.fail()
    signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Stopped.")
