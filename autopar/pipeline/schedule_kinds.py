"""Kinds of pipeline schedules: how the tasks of a mesh follow from the size of a pipeline."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from simulator.program import Run


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The size of a pipeline.

    Attributes:
        num_meshes: number of meshes, which work at the same time.
        num_micro_batches: number of microbatches in one step.
        num_chunks: number of stages on each mesh.

    Raises:
        ValueError: one of them is less than 1.
    """

    num_meshes: int
    num_micro_batches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_meshes", "num_micro_batches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a pipeline needs at least one")

    @property
    def num_stages(self) -> int:
        """Number of stages on all meshes together."""
        return self.num_meshes * self.num_chunks


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A named way to schedule pipelines of any size.

    Attributes:
        row: (mesh, pipeline) -> the tasks of the mesh, in order.
        in_flight: (mesh, pipeline) -> the most pairs (stage, microbatch) whose activations the mesh
            holds at a time. Planning calls it often, so it should not list the tasks.
        summary: what distinguishes the schedule, in a sentence.
        num_chunks: number of stages on each mesh; None for any number.
        forward: name of the schedule of forwards only with the same stages on the same meshes, for
            steps that follow; "" if there is none.
    """

    row: Callable[[int, Pipeline], Iterable[Run]]
    in_flight: Callable[[int, Pipeline], int]
    summary: str
    num_chunks: int | None = 1
    forward: str = ""


class ScheduleError(ValueError):
    """A schedule is unknown, does not fit the pipeline, or does not run every task once."""


def most_in_flight(row: Iterable[Run]) -> int:
    """Return the most pairs (stage, microbatch) whose activations a mesh holds at a time."""
    tasks = list(row)
    release = "W" if any(task.phase == "W" for task in tasks) else "B"
    return max(
        accumulate(((task.phase == "F") - (task.phase == release) for task in tasks), initial=0)
    )
