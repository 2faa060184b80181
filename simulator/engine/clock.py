"""The makespan of a program, exactly as `simulator.engine.simulation.simulate` finds it but without a timeline: fast enough to search with.

A program is turned into arrays once; any costs then play it in a loop over integers, which numba compiles where it is installed and
the program is long (64 stages with 512 microbatches take a millisecond then). What a task does to its mesh is found once for all its
microbatches: nine numbers (`simulator.engine.max_plus`), or a few lines where computation and collectives slow each other (`simulator.engine.contended_effect`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, isnan, nan
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from simulator.costs.cost_model import CostModel
from simulator.engine import simulation
from simulator.engine.contended_effect import PiecewiseEffect, piecewise_effect_of
from simulator.engine.max_plus import MaxPlusMap, contends, max_plus_map_of
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.work import Done, Start

type _Table = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]
"""The effect of each kind, where its pieces begin if it has any, and the pieces of all of them."""


@dataclass(slots=True)
class _Known:
    """What is remembered of costs: what all kinds take, if the clock has the means; whether messages meet, once that was asked for."""

    costs: CostModel
    table: _Table | None
    meet: bool | None = None


_WORTH_COMPILING = (
    100_000  # instructions; loading numba takes a second, and so many in Python a tenth of it
)


@dataclass(frozen=True, slots=True)
class Clock:
    """A program, ready to be timed again and again.

    Attributes:
        rows: where the instructions of each mesh begin in the arrays, and where the last ones end.
        source: for each instruction, the send that it waits for; -1 if it waits for none.
        kind: for each instruction, which of `kinds` it is.
        kinds: (mesh, instruction) that differ in more than the microbatch.
        known: the last costs that were asked for, if any.
    """

    program: Program
    rows: NDArray[np.int64]
    source: NDArray[np.int64]
    kind: NDArray[np.int64]
    kinds: tuple[tuple[int, Instruction], ...]
    known: list[_Known] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, program: Program) -> Self:
        """The clock of a program."""
        played = [
            (mesh, each)
            for mesh, row in enumerate(program.instructions)
            for each in row
            if not isinstance(each, Free)
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
        examples = dict(
            zip(reversed(kind), reversed(played), strict=True)
        )  # the first of each kind
        kinds = tuple(examples[number] for number in range(len(numbers)))
        return cls(program, rows, source, np.array(kind, np.int64), kinds)

    def makespan(self, costs: CostModel, dispatch: float = 0.0, shared: bool = True) -> float:
        """Seconds of the step, as `simulate` finds them with these arguments.

        What the kinds of instruction take at the last costs is remembered: costs must not change, and others take some 20 ms more where tasks
        have many kernels. Two sorts of programs the engine plays, in far more time: those of which a task slows collectives that it does not
        wait for itself, or uses both classes of links; and those whose messages meet, if that is to count.

        Args:
            shared: whether messages of several meshes share the network cards at which they meet, as `simulate` has it; else each has them
                to itself.
        """
        if not self.known or self.known[0].costs is not costs:
            effects = [self._effect(mesh, instruction, costs) for mesh, instruction in self.kinds]
            found = [effect for effect in effects if effect is not None]
            table = _table(found) if len(found) == len(effects) else None
            self.known[:] = [_Known(costs, table)]
        known = self.known[0]
        if shared and known.meet is None:
            known.meet = bool(simulation.meetings_of(self.program, self.kinds, costs))
        if known.table is None or (shared and known.meet):
            of_mesh, _ = simulation.play(self.program, costs, dispatch)
            return max((each.end for each in of_mesh), default=0.0)
        return self._played(known.table, dispatch)

    def play(
        self, effect: Callable[[int, Instruction], MaxPlusMap], dispatch: float = 0.0
    ) -> float:
        """Seconds of the step where an instruction of a mesh has the effect given; it is asked once for each of `kinds`.

        Raises:
            DeadlockError: the meshes wait for one another.
        """
        return self._played(
            _table([effect(mesh, instruction) for mesh, instruction in self.kinds]), dispatch
        )

    def _played(self, table: _Table, dispatch: float) -> float:
        count = len(self.rows) - 1
        scratch = (
            self.rows[:-1].copy(),
            *(np.zeros(count) for _ in range(4)),
            np.full(len(self.kind), nan),
        )
        arrays = self.rows, self.source, self.kind, *table, *scratch
        if len(self.kind) >= _WORTH_COMPILING and find_spec("numba"):
            end = _compiled()(dispatch, *arrays)
        else:
            end = _play(
                dispatch, *(array.tolist() for array in arrays)
            )  # Python is slow at the elements of arrays
        if isnan(end):
            for _ in walk(self.program):  # which raises, and shows where
                pass
            raise AssertionError("the clock is stuck where the walk is not")
        return float(end)

    def _effect(
        self, mesh: int, instruction: Instruction, costs: CostModel
    ) -> MaxPlusMap | PiecewiseEffect | None:
        devices = self.program.meshes[mesh]
        match instruction:
            case Run():
                body = self.program.body(instruction)
                return (piecewise_effect_of if contends(body, costs, devices) else max_plus_map_of)(
                    body, costs, devices
                )
            case Send(_, to, num_bytes):
                pairs = self.program.pairs(mesh, to)
                return MaxPlusMap.transfer(
                    costs.collective("collective_permute", num_bytes / len(pairs), pairs),
                    costs.link(pairs),
                )
            case Recv(_, _, gather) if gather is not None:
                return max_plus_map_of((Start(gather), Done(gather.name)), costs, devices)
            case _:
                return MaxPlusMap()


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


def _table(effects: Sequence[MaxPlusMap | PiecewiseEffect]) -> _Table:
    """Effects as arrays, those without pieces and those with them side by side.

    The last number of a row says whether it is the link between hosts that the instruction keeps busy.
    """
    rows = [
        (*(0.0,) * 9, each.link == "between hosts")
        if isinstance(each, PiecewiseEffect)
        else (*each.compute, *each.within, *each.between, each.between[0] > -inf)
        for each in effects
    ]
    pieces = [each.pieces if isinstance(each, PiecewiseEffect) else () for each in effects]
    begins = np.cumsum([0, *map(len, pieces)])
    joined = [row for each in pieces for row in each]
    return (
        np.array(rows, np.float64).reshape(-1, 10),
        begins,
        np.array(joined, np.float64).reshape(-1, 5),
    )


type _Numbers = Any
"""An array or a list."""


def _play(
    dispatch: float,
    rows: _Numbers,
    source: _Numbers,
    kind: _Numbers,
    effects: _Numbers,
    begins: _Numbers,
    pieces: _Numbers,
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
                piece = begins[kind[i] + 1] - 1
                if piece < begins[kind[i]]:
                    c, near, far = (
                        max(c + effect[0], near + effect[1], far + effect[2]),
                        max(c + effect[3], near + effect[4], far + effect[5]),
                        max(c + effect[6], near + effect[7], far + effect[8]),
                    )
                else:
                    lag = max(0.0, (far if effect[9] else near) - c)
                    while pieces[piece][0] > lag:
                        piece -= 1
                    line = pieces[piece]
                    beyond = lag - line[0]
                    link = c + line[2] + beyond * line[4]
                    c += line[1] + beyond * line[3]
                    if effect[9]:
                        far = link
                    else:
                        near = link
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
