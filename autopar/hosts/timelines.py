"""Timelines of a step on several hosts: recorded by each worker, then merged on one clock."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.runtime.loaded_job import Values, wait_for
from autopar.runtime.timing import span_of
from simulator.engine.timeline import Timeline
from simulator.memory import MemoryUse
from simulator.program import Free, Instruction, Recv, Run, Send
from simulator.spans import Arrow, Span

type Execute = Callable[[int, Instruction, list[Values], int], None]
"""Executes an instruction: (mesh, instruction, values of all meshes, first tag of the step)."""

type Transfer = tuple[str, int, int]
"""Name of a value, sending mesh, receiving mesh."""


@dataclass(frozen=True, slots=True)
class ExecutedInstruction:
    """An instruction of a mesh as one worker executed it.

    Attributes:
        mesh: number of the mesh.
        instruction: the instruction.
        start: when it began, in seconds.
        end: when its results were ready, in seconds.
    """

    mesh: int
    instruction: Instruction
    start: float
    end: float


class Stopwatch:
    """Records when a worker executes instructions, and waits for the results of each.

    Attributes:
        recorded: the instructions in the order of execution.
    """

    def __init__(self, execute: Execute, recorded: list[ExecutedInstruction]) -> None:
        self._execute = execute
        self.recorded = recorded

    def execute(self, mesh: int, instruction: Instruction, values: list[Values], tag: int) -> None:
        """Execute and record an instruction."""
        start = time.perf_counter()
        self._execute(mesh, instruction, values, tag)
        wait_for(values[mesh])
        end = time.perf_counter()
        self.recorded.append(ExecutedInstruction(mesh, instruction, start, end))


def aligned(recorded: Sequence[ExecutedInstruction], offset: float) -> list[ExecutedInstruction]:
    """Return recorded instructions on a clock that is `offset` seconds ahead."""
    return [
        replace(executed, start=executed.start + offset, end=executed.end + offset)
        for executed in recorded
    ]


def merged(
    recordings: Sequence[Sequence[ExecutedInstruction]],
    meshes: tuple[tuple[int, ...], ...],
    memory: tuple[MemoryUse, ...],
) -> Timeline:
    """Return the timeline of the instructions that several workers recorded on the same clock.

    On a mesh of several hosts, an instruction starts when the first host starts it and ends when
    the first host ends it. So the instructions of a mesh do not overlap, and every value is sent
    before it is received: the first host to end a receive had its pieces from some sender, which
    had started to send them.

    Args:
        recordings: for each worker its instructions.
        meshes: for each mesh its devices.
        memory: for each mesh its peak memory.
    """
    by_mesh: dict[int, list[list[ExecutedInstruction]]] = defaultdict(list)
    for recorded in recordings:
        for mesh in dict.fromkeys(executed.mesh for executed in recorded):
            by_mesh[mesh].append([executed for executed in recorded if executed.mesh == mesh])
    begin = min(executed.start for recorded in recordings for executed in recorded)
    spans: list[Span] = []
    sent: dict[Transfer, float] = {}
    received: dict[Transfer, float] = {}
    for mesh, workers in sorted(by_mesh.items()):
        task = ""
        for same in zip(*workers, strict=True):
            instruction = same[0].instruction
            start = min(executed.start for executed in same) - begin
            end = min(executed.end for executed in same) - begin
            match instruction:
                case Run():
                    task = str(instruction)
                case Send(value, to):
                    sent[value, mesh, to] = start
                case Recv(value, source):
                    task = ""
                    received[value, source, mesh] = end
                case Free():
                    continue
            spans.append(span_of(mesh, instruction, start, end, task))
    arrows = tuple(
        Arrow(value, source, start, to, received[value, source, to])
        for (value, source, to), start in sent.items()
    )
    return Timeline(tuple(spans), meshes, memory, arrows)
