"""A run of the sweep as a person meets it: what Snakemake prints, and how the run is stopped.

Cells print their own lines (`experiments.cells`). `SweepRun` replaces Snakemake's lists of files
and jobs by what is left to say: that there is nothing to do, which job failed, how the run ended.
"""

import fcntl
import logging
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, override

import psutil
from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger
from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.common import LogEvent

from experiments import sweep_progress
from experiments.isolate import SWEEP_PROCESS, this_process
from experiments.paper.study import figure_named
from experiments.sweep_job import Sweep
from experiments.sweep_progress import say

LOCK = Path(".snakemake/sweep.lock")
"""A file that a run locks. The lock ends with the process, however it ends."""

CELL_RULES = "simulate_cells", "measure_cells"
"""The rules whose jobs are jobs of the sweep."""

PAPER_CELLS = re.compile(r"results/paper[^/]*/cells/(?P<figure>[^/]+)/(?P<part>[^/]+)\.csv")
"""Outputs with the rows of a part of a figure of the paper, which is a cell."""


class SweepRun:
    """The hooks of the Snakefile: `start`, `succeed` and `fail`.

    Attributes:
        stopped: whether a signal ended the run.
    """

    def __init__(self, workflow: Any, sweep: Sweep, seconds: Mapping[str, float]) -> None:
        """Take over what Snakemake prints, except for a dry run or with --verbose.

        A job on a cluster runs the workflow again for itself, and prints what Snakemake does.

        Args:
            workflow: Snakemake's workflow.
            sweep: the sweep.
            seconds: the recorded seconds of cells.
        """
        self._workflow, self._sweep, self._seconds = workflow, sweep, seconds
        self.stopped = False
        self._foreign: set[psutil.Process] = set()
        self._start = time.monotonic()
        shown = workflow.output_settings
        quiet = shown.dryrun or shown.verbose or Quietness.ALL in (shown.quiet or ())
        if workflow.is_main_process and not quiet:
            for handler in logger.handlers:
                if handler.name == "DefaultStreamHandler":
                    logger.removeHandler(handler)
            logger.addHandler(_SweepLog(self))

    def nothing_to_do(self) -> str:
        """Return the line that says that there is nothing to do."""
        asked = f"{len(self._sweep.cells)} cells, tables and figures are"
        if self._workflow.dag_settings.targets:
            asked = "what was asked for is"
        return f"Nothing to do: {asked} up to date. --forceall computes everything again."

    def start(self) -> None:
        """Lock the results, and say what there is to compute."""
        self._lock()
        self._foreign = set(psutil.Process().children(recursive=True))
        os.environ[SWEEP_PROCESS] = this_process()  # the environment of all jobs
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, self._stop)
        total = sum(len(cells) for _, cells in self._cells(self._workflow.dag.jobs))
        expected = self._expected_seconds()
        sweep_progress.begin(total, expected)
        done = total - len(expected)
        up_to_date = f", {done} up to date" if done else ""
        how_to_stop = "Ctrl-C stops; the same command goes on."
        say(f"{len(expected)} cells to compute{up_to_date}. {how_to_stop}")

    def another_runs(self) -> bool:
        """Return whether another run has locked the results."""
        if not LOCK.exists():
            return False
        with LOCK.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def warn(self, line: str) -> None:
        """Print a line, unless the run is one that prints little."""
        if not self._workflow.output_settings.quiet:
            say(line)

    def succeed(self) -> None:
        """Unlock the results, and say where they are."""
        self._lock_file.close()
        minutes = (time.monotonic() - self._start) / 60
        targets = self._workflow.dag_settings.targets
        if any(target.removeprefix("results/").startswith("paper") for target in targets):
            say(
                f"Done in {minutes:.1f} min. results/paper has the figures, their rows and captions"
                " (results/paper-smoke those of the smoke configuration), paper.pdf and index.html."
            )
            return
        say(
            f"Done in {minutes:.1f} min. Tables are in results/tables, figures in results/figures;"
            " those of measurements on this machine in results/measured. The page"
            " results/report/index.html has all of them, with a report of each cell."
        )

    def fail(self) -> None:
        """Unlock the results, and say how to go on."""
        self._lock_file.close()
        if self.stopped:
            say("Stopped. Results so far are kept; the same command goes on from there.")
        else:
            say("Some jobs failed; see FAILED above. The same command tries them again.")

    def _lock(self) -> None:
        self._lock_file = LOCK.open("a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.close()
            raise SystemExit(
                f"another run of the sweep is writing to {Path.cwd() / 'results'}; wait for its"
                " end, or stop it with Ctrl-C"
            ) from None

    def _stop(self, number: int, frame: object) -> None:
        """End the jobs, and Snakemake, which waits for them.

        Processes that were there before the run, such as a Ray cluster of a test, are not its jobs.
        A second signal kills the jobs that are left. `uv run` may send one, after the terminal.
        """
        del number, frame
        is_first = not self.stopped
        self.stopped = True
        for process in set(psutil.Process().children(recursive=True)) - self._foreign:
            with suppress(psutil.NoSuchProcess):
                process.terminate() if is_first else process.kill()
        if is_first:
            raise KeyboardInterrupt

    def _expected_seconds(self) -> dict[str, float]:
        """Return by how many seconds each cell to compute is expected to delay the end."""
        cores = self._workflow.cores
        return {
            cell: seconds * threads / cores
            for threads, cells in self._cells(self._workflow.dag.needrun_jobs())
            for cell, seconds in cells.items()
        }

    def _cells(self, jobs: Iterable[Any]) -> Iterator[tuple[int, Mapping[str, float]]]:
        """Yield for each job of Snakemake with cells its threads, and its cells' usual seconds."""
        for job in jobs:
            output = str(job.output[0]) if job.output else ""
            if job.rule.name in CELL_RULES:
                cells = self._sweep.jobs[output.removeprefix("results/cells/")].cells
                usual = sweep_progress.USUAL_SECONDS
                yield job.threads, {cell: self._seconds.get(cell, usual) for cell in cells}
            elif found := PAPER_CELLS.fullmatch(output):
                minutes = figure_named(found["figure"]).minutes
                yield job.threads, {f"paper/{found['figure']}/{found['part']}": 60 * minutes}


class _SweepLog(logging.Handler):
    """Prints failures in one line each, and that there is nothing to do."""

    def __init__(self, run: SweepRun) -> None:
        super().__init__()
        self._run = run

    @override
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if getattr(record, "event", None) == LogEvent.JOB_ERROR:
            if not self._run.stopped:
                say(_job_error(vars(record)))
        elif message == NOTHING_TO_BE_DONE_MSG:
            say(self._run.nothing_to_do())
        elif record.levelno >= logging.WARNING and not _repeats_a_job_error(message):
            say(message)


def _job_error(job: Mapping[str, Any]) -> str:
    """Return which job failed, with the last line of its log."""
    logs = [Path(path) for path in job["log"]]
    lines = [
        line
        for path in logs
        if path.exists()
        for line in path.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    reason = lines[-1][:200] if lines else "no message"
    what = f"{job['rule_name']} {job['output'][0]}"
    return f"FAILED {what}: {reason} (log: {', '.join(map(str, logs))})"


def _repeats_a_job_error(message: str) -> bool:
    """Whether a message only says that a job failed, or that Snakemake ends because of it."""
    return "CalledProcessError" in message or message.startswith(
        ("Exiting because a job execution failed", "WorkflowError:\nAt least one job")
    )
