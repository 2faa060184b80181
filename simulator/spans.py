"""Spans of a timeline: intervals in which a stream of a mesh is busy or waits; and sent values."""

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
    "host copy",
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
"""Kinds of kernel and of collective, and others.

- host copy: a copy between the memories of the device and of its host.
- task: a task whose kernels are not distinguished.
- send: a value on its way to another mesh.
- dispatch: the host issues instructions or launches kernels.
- wait: the compute stream waits for communication of its own mesh.
- bubble: the compute stream waits for another mesh.
- host: the compute stream waits for the host.
"""


Link = Literal["within hosts", "between hosts"]
LINKS: tuple[Link, ...] = ("within hosts", "between hosts")


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one stream of one mesh, in seconds from the start of the step.

    Attributes:
        name: the kernel, collective or instruction.
        mesh: the number of the mesh.
        stream: the stream.
        start: when it starts.
        end: when it ends.
        category: what the stream does or waits for.
        task: the instruction that it belongs to, as it prints: `1F0`.
        busy: seconds of its category, if they are fewer than its length. One span per category
            stands for the iterations of a loop.
        awaited: the kind of the collective that a `wait` waits for.
        link: the class of links that communication uses.
        phase: the part of the training step that a kernel belongs to.
        axis: the mesh axes that communication lies along, or the collective that a `wait` waits
            for; empty if unknown.
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
        """Seconds of its category."""
        return self.end - self.start if self.busy is None else self.busy


@dataclass(frozen=True, slots=True)
class Arrow:
    """A value sent from mesh to mesh.

    Attributes:
        value: the value.
        source: the mesh that sends it.
        sent: when `source` starts to send it.
        to: the mesh that receives it.
        received: when `to` can use it.
    """

    value: str
    source: int
    sent: float
    to: int
    received: float
