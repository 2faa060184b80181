"""The makespan of a program, exactly as `simulator.engine.simulate` finds it but without a timeline: fast enough to search with.

A program is turned into arrays once; any costs then play it in a loop over integers, which numba compiles where it is installed and
the program is long (64 stages with 512 microbatches take a millisecond then).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, isnan, nan
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from simulator import engine
from simulator.costs import CostModel
from simulator.effect import Effect, contends, effect_of
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.work import Done, Start

_WORTH_COMPILING = 100_000  # instructions; loading numba takes a second, and so many in Python a tenth of it


@dataclass(frozen=True, slots=True)
class Clock:
    """A program, ready to be timed again and again.

    Attributes:
        rows: where the instructions of each mesh begin in the arrays, and where the last ones end.
        source: for each instruction, the send that it waits for; -1 if it waits for none.
        kind: for each instruction, which of `kinds` it is.
        kinds: (mesh, instruction) that differ in more than the microbatch.
    """

    program: Program
    rows: NDArray[np.int64]
    source: NDArray[np.int64]
    kind: NDArray[np.int64]
    kinds: tuple[tuple[int, Instruction], ...]

    @classmethod
    def of(cls, program: Program) -> Self:
        """The clock of a program."""
        played = [
            (mesh, each) for mesh, row in enumerate(program.instructions) for each in row if not isinstance(each, Free)
        ]
        lengths = Counter(mesh for mesh, _ in played)
        rows = np.cumsum([0, *(lengths[mesh] for mesh in range(len(program.meshes)))])
        sends: defaultdict[tuple[str, int, int], deque[int]] = defaultdict(deque)
        for number, (mesh, each) in enumerate(played):
            if isinstance(each, Send):
                sends[each.value, mesh, each.to].append(number)
        source = np.full(len(played), -1, np.int64)
        for number, (mesh, each) in enumerate(played):
            if isinstance(each, Recv):
                sent = sends[each.value, each.source, mesh]
                # what nobody sends never comes: it waits for itself
                source[number] = sent.popleft() if sent else number
        numbers: dict[Hashable, int] = {}
        kind = [numbers.setdefault((mesh, _kind_of(each)), len(numbers)) for mesh, each in played]
        examples = dict(zip(reversed(kind), reversed(played), strict=True))  # the first of each kind
        kinds = tuple(examples[number] for number in range(len(numbers)))
        return cls(program, rows, source, np.array(kind, np.int64), kinds)

    def makespan(self, costs: CostModel, dispatch: float = 0.0) -> float:
        """Seconds of the step, as `simulate` finds them with these arguments.

        Where tasks compute beside collectives that slow them, or several meshes send through one network card, it is the engine that
        finds them, in more time.
        """
        contends = any(self._contends(mesh, instruction, costs) for mesh, instruction in self.kinds)
        if contends or engine.meetings_of(self.program, costs):
            of_mesh, _ = engine.play(self.program, costs, dispatch)
            return max((each.end for each in of_mesh), default=0.0)
        return self.play(lambda mesh, instruction: self._effect(mesh, instruction, costs), dispatch)

    def play(self, effect: Callable[[int, Instruction], Effect], dispatch: float = 0.0) -> float:
        """Seconds of the step where an instruction of a mesh has the effect given; it is asked once for each of `kinds`.

        Raises:
            DeadlockError: the meshes wait for one another.
        """
        effects = [effect(mesh, instruction) for mesh, instruction in self.kinds]
        # a transfer is there when its link is free again; what goes over the one between hosts tells it from waiting for nothing
        table = np.array(
            [(*each.compute, *each.within, *each.between, each.between[0] > -inf) for each in effects], np.float64
        ).reshape(-1, 10)
        count = len(self.rows) - 1
        scratch = self.rows[:-1].copy(), *(np.zeros(count) for _ in range(4)), np.full(len(self.kind), nan)
        arrays = self.rows, self.source, self.kind, table, *scratch
        if len(self.kind) >= _WORTH_COMPILING and find_spec("numba"):
            end = _compiled()(dispatch, *arrays)
        else:
            end = _play(dispatch, *(array.tolist() for array in arrays))  # Python is slow at the elements of arrays
        if isnan(end):
            for _ in walk(self.program):  # which raises, and shows where
                pass
            raise AssertionError("the clock is stuck where the walk is not")
        return float(end)

    def _contends(self, mesh: int, instruction: Instruction, costs: CostModel) -> bool:
        return isinstance(instruction, Run) and contends(
            self.program.body(instruction), costs, self.program.meshes[mesh]
        )

    def _effect(self, mesh: int, instruction: Instruction, costs: CostModel) -> Effect:
        devices = self.program.meshes[mesh]
        match instruction:
            case Run():
                return effect_of(self.program.body(instruction), costs, devices)
            case Send(_, to, num_bytes):
                pairs = self.program.pairs(mesh, to)
                return Effect.transfer(costs.collective("permute", num_bytes / len(pairs), pairs), costs.link(pairs))
            case Recv(_, _, gather) if gather is not None:
                return effect_of((Start(gather), Done(gather.name)), costs, devices)
            case _:
                return Effect()


def _kind_of(instruction: Instruction) -> Hashable:
    """The instruction without its microbatch."""
    match instruction:
        case Run():
            return instruction.task
        case Send(_, to, num_bytes):
            return to, num_bytes
        case Recv(_, _, gather):
            return gather and replace(gather, name="")
        case Free():
            return None


type _Numbers = Any
"""An array or a list."""


def _play(
    dispatch: float,
    rows: _Numbers,
    source: _Numbers,
    kind: _Numbers,
    effects: _Numbers,
    at: _Numbers,
    compute: _Numbers,
    within: _Numbers,
    between: _Numbers,
    host: _Numbers,
    sent: _Numbers,
) -> float:
    """`simulator.program.walk` with clocks; nan for a deadlock.

    Written over on the way: for each mesh the instruction that it is `at`, and when its streams are free; when each value is sent.
    """
    progressed = True
    while progressed:
        progressed = False
        for mesh in range(len(at)):
            c, near, far, h, i = compute[mesh], within[mesh], between[mesh], host[mesh], at[mesh]
            while i < rows[mesh + 1]:
                awaited = source[i]
                if awaited >= 0 and isnan(sent[awaited]):
                    break
                h += dispatch
                c = max(c, h)
                if awaited >= 0:
                    c = max(c, sent[awaited])
                effect = effects[kind[i]]
                c, near, far = (
                    max(c + effect[0], near + effect[1], far + effect[2]),
                    max(c + effect[3], near + effect[4], far + effect[5]),
                    max(c + effect[6], near + effect[7], far + effect[8]),
                )
                sent[i] = far if effect[9] else near
                i += 1
                progressed = True
            compute[mesh], within[mesh], between[mesh], host[mesh], at[mesh] = c, near, far, h, i
    end = 0.0
    for mesh in range(len(at)):
        if at[mesh] < rows[mesh + 1]:
            return nan
        end = max(end, compute[mesh], within[mesh], between[mesh])
    return end


@cache
def _compiled() -> Callable[..., float]:
    return import_module("numba").njit(cache=True)(_play)
