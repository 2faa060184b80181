"""Results of cells: what they contain, their files, and the line that shows one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

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
        equality_error: largest absolute difference of the loss and the updated state from those of
            the serial step.
        planning_time_s: seconds of planning.
        compile_time_s: seconds of compiling. For a simulated cell it is compiled for the cluster,
            and the simulation is included, which takes much less.
    """

    status: Status = "ok"
    reason: str = ""
    step_time_s: float | None = None
    step_time_std_s: float | None = None
    memory_bytes_per_device: int | None = None
    equality_error: float | None = None
    planning_time_s: float | None = None
    compile_time_s: float | None = None

    def __str__(self) -> str:
        if self.status == "failed":
            return f"FAILED {self.reason.splitlines()[0]}"
        parts = [] if self.status == "ok" else [self.status.replace("_", " ").upper()]
        if self.step_time_s is not None:
            parts.append(f"{self.step_time_s * 1e3:9.2f} ms")
        if self.memory_bytes_per_device is not None:
            parts.append(f"{self.memory_bytes_per_device / 2**30:7.3f} GiB")
        if self.equality_error is not None:
            parts.append(f"differs from serial by {self.equality_error:.1e}")
        if self.step_time_s is None and self.planning_time_s is not None:
            parts.append(f"planned in {self.planning_time_s:.2f} s")
        return ", ".join(parts) or "nothing to plan"


def cell_path(directory: Path, strategy: str) -> Path:
    """Return the file of the result of a cell."""
    return directory / f"{strategy}.json"


def plan_path(directory: Path, strategy: str) -> Path:
    """Return the file of the plan of a cell."""
    return directory / f"{strategy}.plan.json"


def write_job(directory: Path, job: Job) -> None:
    """Write into `directory` which job its results belong to."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.json").write_text(job.to_json() + "\n")


def read_job(directory: Path) -> Job:
    """Return the job that the results in `directory` belong to."""
    return Job.from_json((directory / "job.json").read_text())


def read_cell(directory: Path, strategy: str) -> Cell:
    """Return the result of a cell; one without a file has failed."""
    path = cell_path(directory, strategy)
    if not path.exists():
        return Cell("failed", f"no result at {path}")
    return Cell(**json.loads(path.read_text()))


def write_cell(what: str, job: Job, directory: Path, strategy: str, cell: Cell) -> None:
    """Write the result of a cell, and print it in one line that starts with `what`."""
    cell_path(directory, strategy).write_text(json.dumps(asdict(cell), indent=1) + "\n")
    where = f"{job.platform} {job.model}-{job.size} on {mesh_name(job.mesh)}"
    print(f"{what:<8} {where:<32} {strategy:<16} {cell}", flush=True)


def remaining(job: Job, directory: Path) -> Sequence[str]:
    """Return the strategies of `job` that have no result in `directory` yet, in order."""
    return [strategy for strategy in job.strategies if not cell_path(directory, strategy).exists()]


def compute_cells(
    what: str, job: Job, directory: Path, compute: Callable[[str], Cell], plans: Path | None = None
) -> None:
    """Compute and write the remaining cells of `job`.

    An error ends the process; `experiments.isolate` then writes the failed cell and starts the
    process again for the others.

    Args:
        what: "plan", "measure" or "simulate".
        job: the job.
        directory: where its results go.
        compute: returns the result of a strategy.
        plans: the directory of the plans that the cells run, if they do. A cell whose planning
            failed fails for the same reason; the others take over its planning time.
    """
    for strategy in remaining(job, directory):
        planning = read_cell(plans, strategy) if plans else Cell()
        if planning.status == "failed":
            cell = replace(planning, reason=f"planning: {planning.reason}")
        elif plans:
            cell = replace(compute(strategy), planning_time_s=planning.planning_time_s)
        else:
            cell = compute(strategy)
        write_cell(what, job, directory, strategy, cell)
