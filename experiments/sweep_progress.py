"""How far a run of the sweep is, in a file that its processes share.

The first line of the file says what the run has to compute. Each finished cell appends a line.
Processes write a line with one call to the operating system, so lines do not mix.
"""

import csv
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

from experiments.sweep_job import Sweep

PROGRESS = Path("results/progress.jsonl")
"""The file, below the working directory of the run."""

USUAL_SECONDS = 5.0
"""Seconds of a cell that has never been recorded."""

_RECORDED_SECONDS = 60.0
"""Seconds of recorded cells that the first estimates of a run are based on."""


def recorded_seconds(*tables: Path) -> dict[str, float]:
    """Return the seconds of each cell by name, from the first of `tables` that can be read.

    They only serve estimates, so a table that was changed by hand does not stop a run.
    """
    for table in tables:
        with suppress(OSError, ValueError, KeyError, csv.Error), table.open(newline="") as file:
            seconds = {
                "{source}/{platform}/{model}-{size}/{mesh}/{strategy}".format_map(row): float(
                    row["total_time_s"]
                )
                for row in csv.DictReader(file)
                if row["total_time_s"]
            }
            return {cell: value for cell, value in seconds.items() if 0 <= value < inf}
    return {}


def job_priorities(sweep: Sweep, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return a priority for each job: jobs of the first figure first, then the longest.

    Args:
        sweep: the sweep.
        seconds: the recorded seconds of cells.
    """
    first = next(iter(sweep.figures))
    return {
        name: (1e6 if job.figure == first else 0)
        + sum(seconds.get(cell, USUAL_SECONDS) for cell in job.cells)
        for name, job in sweep.jobs.items()
    }


def say(line: str) -> None:
    """Print a line; a run whose reader has gone, e.g. `head`, goes on without one."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def begin(total: int, expected_seconds: Mapping[str, float], path: Path = PROGRESS) -> None:
    """Start the file of a run.

    Args:
        total: number of cells of the sweep, those that are up to date included.
        expected_seconds: for each cell to compute, the seconds by which it is expected to delay
            the end of the run.
        path: the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    first = {"start": time.time(), "total": total, "expected_seconds": dict(expected_seconds)}
    path.write_text(json.dumps(first) + "\n")


def finish(cell: str, *, computed: bool = True, path: Path = PROGRESS) -> str:
    """Record that a cell has its result, and return how far the run is.

    Args:
        cell: the name of the cell.
        computed: whether this run computed it; False if an earlier one that was stopped did.
        path: the file of the run.

    Returns:
        For example "12/188, about 6 min left"; "" outside of a run.
    """
    if not path.exists():
        return ""
    with path.open("a") as file:
        file.write(json.dumps({"cell": cell, "computed": computed}) + "\n")
    first, *finished = map(json.loads, path.read_text().splitlines())
    expected: dict[str, float] = first["expected_seconds"]
    left = expected.keys() - {line["cell"] for line in finished}
    count = f"{first['total'] - len(left)}/{first['total']}"
    if not left:
        return count
    computed_seconds = sum(
        expected.get(name, 0.0) for name in {line["cell"] for line in finished if line["computed"]}
    )
    elapsed = time.time() - first["start"]
    # At first a run is expected to be as fast as the recorded one; what it computes corrects that.
    slowdown = (elapsed + _RECORDED_SECONDS) / (computed_seconds + _RECORDED_SECONDS)
    return f"{count}, {_duration(slowdown * sum(expected[name] for name in left))} left"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    return f"about {round(seconds / 60)} min"
