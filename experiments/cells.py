"""Results of cells: what each says, where it is written, and the line that shows it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from experiments.sweep_job import Job, mesh_name

Status = Literal["ok", "out_of_memory", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of one cell; None for what it did not get to know.

    Attributes:
        reason: why, if not "ok".
        step_time_s, step_time_std_s: mean and standard deviation of the step time (a simulated one has no spread).
        equality_error: largest absolute difference of value and updated state to the serial step.
        compile_time_s: compiling (of a simulated cell: for its cluster, and the simulation itself, which is much shorter).
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
    return directory / f"{strategy}.json"


def plan_path(directory: Path, strategy: str) -> Path:
    return directory / f"{strategy}.plan.json"


def write_job(directory: Path, job: Job) -> None:
    """Say in `directory` whose results it holds."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.json").write_text(job.to_json() + "\n")


def read_job(directory: Path) -> Job:
    """The job whose results `directory` holds."""
    return Job.from_json((directory / "job.json").read_text())


def read_cell(directory: Path, strategy: str) -> Cell:
    """The result of a cell; a missing one failed."""
    path = cell_path(directory, strategy)
    if not path.exists():
        return Cell("failed", f"no result at {path}")
    return Cell(**json.loads(path.read_text()))


def write_cell(what: str, job: Job, directory: Path, strategy: str, cell: Cell) -> None:
    """Keep the result, and show it in one line."""
    cell_path(directory, strategy).write_text(json.dumps(asdict(cell), indent=1) + "\n")
    where = f"{job.platform} {job.model}-{job.size} on {mesh_name(job.mesh)}"
    print(f"{what:<8} {where:<32} {strategy:<16} {cell}", flush=True)


def remaining(job: Job, directory: Path) -> Sequence[str]:
    """Strategies of `job` that have no result in `directory` yet, in order."""
    return [strategy for strategy in job.strategies if not cell_path(directory, strategy).exists()]


def compute_cells(
    what: str, job: Job, directory: Path, compute: Callable[[str], Cell], plans: Path | None = None
) -> None:
    """Compute and write the remaining cells of `job`.

    With `plans`, a cell whose planning failed fails for the same reason, and the others get their planning time. Any other error
    ends the process: `experiments.isolate` writes the failed cell and comes back for the rest.
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
