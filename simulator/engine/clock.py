"""The makespan of a program, equal to that of the event engine, without a timeline.

It is fast enough to search with: a program becomes arrays once, and any cost model then plays them
in a loop over integers. Numba compiles the loop where it is installed and the program is long; 64
stages with 512 microbatches take a millisecond then. The effect of a task on its mesh is computed
once for all microbatches: a max-plus map (`simulator.engine.max_plus`) or, for tasks with
contention, a piecewise-linear function (`simulator.engine.contended_effect`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, isnan, nan
from typing import Self

import numpy as np
from numpy.typing import NDArray

from simulator.costs.cost_model import CostModel
from simulator.engine import simulation
from simulator.engine.contended_effect import PiecewiseEffect, piecewise_effect
from simulator.engine.max_plus import MaxPlusMap, max_plus_map
from simulator.engine.priced_ops import contends, price
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.work import Done, Start

type _Effect = MaxPlusMap | PiecewiseEffect
type _EffectTable = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]
"""(kinds, 10) max-plus maps, (kinds + 1,) where the pieces of each kind begin, (pieces, 5) pieces.

The last number of a map is 1 for an instruction that keeps the links between hosts busy, else 0.
"""

# The number of instructions from which compiling pays: loading numba takes a second, and as many
# instructions take a tenth of that in Python.
_WORTH_COMPILING = 100_000


@dataclass(slots=True)
class CachedCosts:
    """What a clock remembers of a cost model.

    Attributes:
        costs: the cost model.
        table: the effects of all kinds of instruction; None if the clock can't express one of them.
        contended: whether messages of several meshes may share NICs; None if not yet computed.
    """

    costs: CostModel
    table: _EffectTable | None
    contended: bool | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """A program as arrays, to be timed again and again.

    Attributes:
        program: the program.
        rows: (meshes + 1,) where the instructions of each mesh begin in `source` and `kind`.
        source: (instructions,) the send that each instruction waits for; -1 if it waits for none.
        kind: (instructions,) the index of each instruction's kind in `kinds`.
        kinds: (mesh, instruction) for each kind. Instructions of a kind differ in the microbatch
            only.
        cached: the effects at the last cost model, if any.
    """

    program: Program
    rows: NDArray[np.int64]
    source: NDArray[np.int64]
    kind: NDArray[np.int64]
    kinds: tuple[tuple[int, Instruction], ...]
    cached: list[CachedCosts] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, program: Program) -> Self:
        """Return the clock of a program."""
        rows = [
            [instruction for instruction in row if not isinstance(instruction, Free)]
            for row in program.instructions
        ]
        instructions = [(mesh, instruction) for mesh, row in enumerate(rows) for instruction in row]
        numbers: dict[Hashable, int] = {}
        kind: list[int] = []
        kinds: list[tuple[int, Instruction]] = []
        for mesh, instruction in instructions:
            key = mesh, _kind_of(instruction)
            if key not in numbers:
                numbers[key] = len(kinds)
                kinds.append((mesh, instruction))
            kind.append(numbers[key])
        return cls(
            program,
            np.cumsum([0, *map(len, rows)]),
            _sources(instructions),
            np.array(kind, np.int64),
            tuple(kinds),
        )

    def makespan(self, costs: CostModel, dispatch: float = 0.0, shared: bool = True) -> float:
        """Return the seconds of the step, as `simulate` does with these arguments.

        The clock caches the effects at the last cost model, which must not change. Another one
        takes some 20 ms more where tasks have many kernels. The engine plays two sorts of programs,
        in far more time: programs with a task that contends and either leaves a collective running
        or uses both classes of links; and, if `shared`, programs whose messages may share NICs.

        Args:
            costs: seconds of kernels, collectives and messages.
            dispatch: seconds of the host for each instruction.
            shared: whether messages of several meshes share NICs, as in `simulate`. Otherwise each
                message has its NICs to itself.

        Raises:
            DeadlockError: the meshes wait for one another.
        """
        if not self.cached or self.cached[0].costs is not costs:
            effects = [self._effect(mesh, instruction, costs) for mesh, instruction in self.kinds]
            expressed = [effect for effect in effects if effect is not None]
            table = _table(expressed) if len(expressed) == len(effects) else None
            self.cached[:] = [CachedCosts(costs, table)]
        cached = self.cached[0]
        if shared and cached.contended is None:
            cached.contended = bool(simulation.shared_nics_of(self.program, self.kinds, costs))
        if cached.table is None or (shared and cached.contended):
            meshes, _ = simulation.play(self.program, costs, dispatch)
            return max((streams.end for streams in meshes), default=0.0)
        return self._makespan_of(cached.table, dispatch)

    def makespan_with(
        self, effect: Callable[[int, Instruction], MaxPlusMap], dispatch: float = 0.0
    ) -> float:
        """Return the seconds of the step with given effects.

        Args:
            effect: the effect of a mesh's instruction on that mesh; called once for each kind.
            dispatch: seconds of the host for each instruction.

        Raises:
            DeadlockError: the meshes wait for one another.
        """
        effects = [effect(mesh, instruction) for mesh, instruction in self.kinds]
        return self._makespan_of(_table(effects), dispatch)

    def _makespan_of(self, table: _EffectTable, dispatch: float) -> float:
        count = len(self.rows) - 1
        at = self.rows[:-1].copy()
        sent = np.full(len(self.kind), nan)
        times = [np.zeros(count) for _ in range(4)]
        arrays = (self.rows, self.source, self.kind, *table, at, sent, *times)
        if len(self.kind) >= _WORTH_COMPILING and find_spec("numba"):
            end = _compiled_walk()(dispatch, *arrays)
        else:  # Python is slow at the elements of arrays.
            end = _timed_walk(dispatch, *(array.tolist() for array in arrays))
        if isnan(end):
            for _ in walk(self.program):  # raises an error that shows where
                pass
            raise AssertionError("the clock is stuck where the walk is not")
        return float(end)

    def _effect(self, mesh: int, instruction: Instruction, costs: CostModel) -> _Effect | None:
        devices = self.program.meshes[mesh]
        match instruction:
            case Run():
                ops = price(self.program.body(instruction), costs, devices)
                return piecewise_effect(ops) if contends(ops) else max_plus_map(ops)
            case Send(_, to, num_bytes):
                pairs = self.program.pairs(mesh, to)
                return MaxPlusMap.transfer(
                    costs.collective("collective_permute", num_bytes / len(pairs), pairs),
                    costs.link(pairs),
                )
            case Recv(_, _, gather) if gather is not None:
                return max_plus_map(price((Start(gather), Done(gather.name)), costs, devices))
            case _:
                return MaxPlusMap()


def _sources(instructions: Sequence[tuple[int, Instruction]]) -> NDArray[np.int64]:
    """Return the index of the send that each instruction waits for; -1 where there is none."""
    sends: defaultdict[tuple[str, int, int], deque[int]] = defaultdict(deque)
    for index, (mesh, instruction) in enumerate(instructions):
        if isinstance(instruction, Send):
            sends[instruction.value, mesh, instruction.to].append(index)
    sources = np.full(len(instructions), -1, np.int64)
    for index, (mesh, instruction) in enumerate(instructions):
        if isinstance(instruction, Recv):
            sent = sends[instruction.value, instruction.source, mesh]
            # A value that no mesh sends never arrives: its receive waits for itself.
            sources[index] = sent.popleft() if sent else index
    return sources


def _kind_of(instruction: Instruction) -> Hashable:
    """Return the instruction without its microbatch."""
    match instruction:
        case Run():
            return instruction.task
        case Send(_, to, num_bytes):
            return to, num_bytes
        case Recv(_, _, gather):
            return gather and replace(gather, name="")
        case Free():
            return None


def _table(effects: Sequence[_Effect]) -> _EffectTable:
    maps: list[tuple[float, ...]] = []
    pieces: list[tuple[float, ...]] = []
    begins = [0]
    for effect in effects:
        if isinstance(effect, PiecewiseEffect):
            maps.append((*(0.0,) * 9, effect.link == "between hosts"))
            pieces += effect.pieces
        else:
            row = *effect.compute, *effect.within, *effect.between, effect.between[0] > -inf
            maps.append(row)
        begins.append(len(pieces))
    return (
        np.array(maps, np.float64).reshape(-1, 10),
        np.array(begins),
        np.array(pieces, np.float64).reshape(-1, 5),
    )


def _timed_walk(
    dispatch, rows, source, kind, maps, begins, pieces, at, sent, compute, within, between, host
):
    """Return the makespan; nan for a deadlock.

    This is `simulator.program.walk` with times. It applies the effects that `stream_rules`
    determines, and states only that a mesh waits for its host and for what it receives. It is one
    function over arrays or lists, because numba compiles it and because a call for each instruction
    would cost Python as much as the rest.

    `rows`, `source` and `kind` are those of `Clock`; `maps`, `begins` and `pieces` are an
    `_EffectTable`. The others are overwritten: `at` is the next instruction of each mesh, `sent`
    the end of each instruction's transfer, nan before it is carried out, and `compute`, `within`,
    `between` and `host` are the times until which the streams and the host of each mesh are busy.
    """
    progressed = True
    while progressed:
        progressed = False
        for mesh in range(len(at)):
            index, computed, launched = at[mesh], compute[mesh], host[mesh]
            near, far = within[mesh], between[mesh]
            while index < rows[mesh + 1]:
                awaited = source[index]
                if awaited >= 0 and isnan(sent[awaited]):
                    break
                launched += dispatch
                computed = max(computed, launched)
                if awaited >= 0:
                    computed = max(computed, sent[awaited])
                effect = maps[kind[index]]
                piece = begins[kind[index] + 1] - 1
                if piece < begins[kind[index]]:  # a max-plus map
                    computed, near, far = (
                        max(computed + effect[0], near + effect[1], far + effect[2]),
                        max(computed + effect[3], near + effect[4], far + effect[5]),
                        max(computed + effect[6], near + effect[7], far + effect[8]),
                    )
                else:
                    lag = max(0.0, (far if effect[9] else near) - computed)
                    while pieces[piece][0] > lag:
                        piece -= 1
                    line = pieces[piece]
                    beyond = lag - line[0]
                    link = computed + line[2] + beyond * line[4]
                    computed += line[1] + beyond * line[3]
                    if effect[9]:
                        far = link
                    else:
                        near = link
                sent[index] = far if effect[9] else near
                index += 1
                progressed = True
            at[mesh], compute[mesh], host[mesh] = index, computed, launched
            within[mesh], between[mesh] = near, far
    end = 0.0
    for mesh in range(len(at)):
        if at[mesh] < rows[mesh + 1]:
            return nan
        end = max(end, compute[mesh], within[mesh], between[mesh])
    return end


@cache
def _compiled_walk() -> Callable[..., float]:
    return import_module("numba").njit(cache=True)(_timed_walk)
