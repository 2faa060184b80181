"""When each instruction of a step has run on the workers of several hosts, on one clock."""

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
"""Carries out an instruction of a mesh, on the values of all meshes and with the first number of the step's deliveries."""


@dataclass(frozen=True, slots=True)
class Note:
    """An instruction of a mesh, as a worker has carried it out: from when to when, in seconds."""

    mesh: int
    instruction: Instruction
    start: float
    end: float


class Stopwatch:
    """Notes when a worker carries out instructions; each waits then for what it has made.

    Attributes:
        notes: in the order of what was done.
    """

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self.notes: list[Note] = []

    def execute(
        self, mesh: int, instruction: Instruction, values: list[Values], letter: int
    ) -> None:
        """Carry out an instruction and note it."""
        start = time.perf_counter()
        self._execute(mesh, instruction, values, letter)
        wait_for(values[mesh])
        self.notes.append(Note(mesh, instruction, start, time.perf_counter()))


def aligned(notes: Sequence[Note], offset: float) -> list[Note]:
    """What a worker has noted, by a clock that shows `offset` seconds more."""
    return [replace(each, start=each.start + offset, end=each.end + offset) for each in notes]


def merged(
    notes: Sequence[Sequence[Note]],
    meshes: tuple[tuple[int, ...], ...],
    memory: tuple[MemoryUse, ...],
) -> Timeline:
    """The timeline of what workers have noted by the same clock, from the first instruction on.

    A mesh of several hosts begins an instruction when the first of them begins it, and has done it when the first of them has. So its
    instructions do not overlap, and what is received was sent before: of the hosts that receive, the first to end had its pieces from
    some host, which had begun to send them.
    """
    by_mesh: dict[int, list[list[Note]]] = defaultdict(list)
    for of_worker in notes:
        for mesh in dict.fromkeys(each.mesh for each in of_worker):
            by_mesh[mesh].append([each for each in of_worker if each.mesh == mesh])
    begin = min(each.start for of_worker in notes for each in of_worker)
    spans: list[Span] = []
    sent: dict[tuple[str, int, int], float] = {}
    received: dict[tuple[str, int, int], float] = {}
    for mesh, workers in sorted(by_mesh.items()):
        task = ""
        for same in zip(*workers, strict=True):
            instruction = same[0].instruction
            start, end = (
                min(each.start for each in same) - begin,
                min(each.end for each in same) - begin,
            )
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
    arrows = tuple(Arrow(at[0], at[1], sent[at], at[2], received[at]) for at in sent)
    return Timeline(tuple(spans), meshes, memory, arrows)
