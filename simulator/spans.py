"""The spans of a timeline: what a stream of a mesh does from when to when, and values on their way from mesh to mesh."""

from dataclasses import dataclass
from typing import Literal

from simulator.work import TrainingPhase

Stream = Literal["compute", "communication", "host"]

Category = Literal[
    "gemm",
    "conv",
    "attention",
    "attention backward",
    "memory",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "task",
    "send",
    "dispatch",
    "wait",
    "bubble",
    "host",
]
"""Kinds of kernel and of collective; `task` is a whole task whose kernels are not told apart, `wait` is compute waiting for its own
communication, `bubble` for another mesh, `host` for the host, which is busy with `dispatch`."""


Link = Literal["within hosts", "between hosts"]
LINKS: tuple[Link, ...] = ("within hosts", "between hosts")


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one stream of one mesh, in seconds from the start of the step.

    Attributes:
        task: the instruction it belongs to, as it prints: `1F0`.
        busy: seconds it stands for, where that is less than its length: the iterations of a loop are summed up as one span per
            category.
        awaited: the kind of the collective that a `wait` waits for.
        axis: the mesh axes that communication lies along, or that of the collective that a `wait` waits for; nothing if nobody says.
        link: what communication goes over.
        part: of a kernel, the part of the training step.
    """

    name: str
    mesh: int
    stream: Stream
    start: float
    end: float
    category: Category
    task: str = ""
    busy: float | None = None
    awaited: Category | None = None
    link: Link | None = None
    phase: TrainingPhase = ""
    axis: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start if self.busy is None else self.busy


@dataclass(frozen=True, slots=True)
class Arrow:
    """A value on its way: mesh `source` starts to send it at `sent`, mesh `to` goes on with it at `received`."""

    value: str
    source: int
    sent: float
    to: int
    received: float
