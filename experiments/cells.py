"""Results of cells: what they contain, their files, and the line that shows one."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from experiments import sweep_progress
from experiments.sweep_job import Job, mesh_name

Status = Literal["ok", "out_of_memory", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one cell; None for a number that it did not get to.

    Attributes:
        status: whether it ran, or was predicted to fit in memory.
        reason: why it did not, unless the status is "ok".
        step_time_s: mean step time.
        step_time_std_s: standard deviation of the step time; None for a simulated step.
        memory_bytes_per_device: bytes that the step needs on one device.
        equality_error: largest absolute difference of the loss and the updated state from the
            results of the serial step.
        planning_time_s: seconds of planning.
        compile_time_s: seconds of compiling. For a simulated cell it is compiled for the cluster,
            and the simulation is included, which takes much less.
        total_time_s: seconds that the cell took in all.
    """

    status: Status = "ok"
    reason: str = ""
    step_time_s: float | None = None
    step_time_std_s: float | None = None
    memory_bytes_per_device: int | None = None
    equality_error: float | None = None
    planning_time_s: float | None = None
    compile_time_s: float | None = None
    total_time_s: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.step_time_s is not None:
            parts.append(f"{self.step_time_s * 1e3:10.2f} ms")
        if self.memory_bytes_per_device is not None:
            parts.append(_memory(self.memory_bytes_per_device))
        match self.status:
            case "ok":
                parts.append("ok")
            case "out_of_memory":
                parts.append("does not fit")
            case "failed":
                parts.append(f"FAILED {_shortened(self.reason)}")
        return "  ".join(parts)


def _memory(num_bytes: int) -> str:
    if num_bytes < 2**27:
        return f"{num_bytes / 2**20:8.3f} MiB"
    return f"{num_bytes / 2**30:8.3f} GiB"


def _shortened(reason: str) -> str:
    """Return the first line of a reason, of 200 characters at most."""
    line = (reason.splitlines() or [""])[0]
    return line if len(line) <= 200 else f"{line[:200]}..."


def cell_path(directory: Path, strategy: str) -> Path:
    """Return the file of the result of a cell."""
    return directory / f"{strategy}.json"


def plan_path(directory: Path, strategy: str) -> Path:
    """Return the file of the plan of a cell; a strategy with nothing to decide has none."""
    return directory / f"{strategy}.plan.json"


def program_path(directory: Path, strategy: str) -> Path:
    """Return the file of the program of a simulated cell."""
    return directory / f"{strategy}.program.json"


def timeline_path(directory: Path, strategy: str) -> Path:
    """Return the file of the timeline of a simulated cell, for Perfetto."""
    return directory / f"{strategy}.timeline.json"


def write_job(directory: Path, job: Job) -> None:
    """Write into `directory` which job its results belong to."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.json").write_text(job.to_json() + "\n")


def read_job(directory: Path) -> Job:
    """Return the job that the results in `directory` belong to."""
    return Job.from_json((directory / "job.json").read_text())


def read_cell(directory: Path, strategy: str) -> Cell:
    """Return the result of a cell; one without a file has failed.

    Raises:
        ValueError: the file is no result of a cell.
    """
    path = cell_path(directory, strategy)
    if not path.exists():
        return Cell("failed", f"no result at {path}")
    try:
        return Cell(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is no result of a cell ({error}); delete it and run the sweep again"
        ) from None


def write_cell(job: Job, directory: Path, strategy: str, cell: Cell) -> None:
    """Write the result of a cell whole or not at all, and print it in one line."""
    path = cell_path(directory, strategy)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(cell), indent=1) + "\n")
    os.replace(partial, path)
    progress = sweep_progress.finish(f"{job.name}/{strategy}")
    model, mesh = f"{job.model}-{job.size}", mesh_name(job.mesh)
    where = f"{job.source:<9} {model:<13} {job.platform:<12} {mesh:<4} {strategy:<18}"
    sweep_progress.say(f"{where} {cell}{progress and f'  ({progress})'}")


def remaining(job: Job, directory: Path) -> Sequence[str]:
    """Return the strategies of `job` that have no result in `directory` yet, in order."""
    return [strategy for strategy in job.strategies if not cell_path(directory, strategy).exists()]


def compute_cells(job: Job, directory: Path, compute: Callable[[str], Cell]) -> None:
    """Compute and write the remaining cells of `job`.

    An error ends the process; `experiments.isolate` then writes the failed cell and starts the
    process again for the others.

    Args:
        job: the job.
        directory: where its results go.
        compute: returns the result of a strategy.
    """
    for strategy in remaining(job, directory):
        start = time.perf_counter()
        cell = compute(strategy)
        seconds = time.perf_counter() - start
        write_cell(job, directory, strategy, replace(cell, total_time_s=seconds))
