"""Bytes alive on one device at every moment of a step, as a function of what is decided.

A moment is an equation of the flat jaxpr. Inputs live through the whole step, and a carried output takes the place of its
input. Other values live from the equation that makes them to the last that reads them, if they are stored at all: what a
fusion keeps in registers is not. What microbatches accumulate lives as long as their loop.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from autopar.graph import Atom, aval_of
from autopar.sharding.decisions import Decisions
from autopar.sharding.moves import passes_moves
from autopar.sharding.once import each_once
from autopar.sharding.problem import Limit
from autopar.sharding.spec import LogicalMesh, Spec, Specs, local_shape
from autopar.sharding.storage import is_relaid, is_view, lifetimes
from autopar.trace import StepGraph
from autopar.work import array_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Lifetime:
    """A value that takes memory from moment `start` to moment `end`, both included; `sizes` in bytes per option.

    `var` is None for what other microbatches hold.
    """

    decision: int
    start: int
    end: int
    sizes: np.ndarray
    var: Var | None = None


class Memory:
    """The memory of a step under each choice."""

    def __init__(self, step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> None:
        self.step, self.decisions, self.mesh = step, decisions, mesh
        self.moments = len(step.jaxpr.eqns) + 1
        self.moved_for = {eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if passes_moves(eqn)}
        self.lifetimes = _lifetimes(step, decisions, mesh)

    def of_values(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes of the values alive at each moment, shape (moments,)."""
        return self._sum((life.start, life.end, life.sizes[choice[life.decision]]) for life in self.lifetimes)

    def of_copies(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes of resharded copies alive at each moment, shape (moments,).

        The compiler makes one copy for all who want the same, and keeps it from the first to the last of them.
        """
        alive: dict[tuple[Atom, Spec], tuple[int, int]] = {}
        for use in self.decisions.uses:
            if use.eqn is None:
                continue
            required, eqn = use.required[choice[use.decision]], self.step.jaxpr.eqns[use.eqn]
            if use.value.specs[choice[use.value.decision]] == required and not is_relaid(eqn, use.operand):
                continue
            atom = self._moved(eqn.invars[use.operand])
            first, last = alive.get((atom, required), (use.eqn, use.eqn))
            alive[atom, required] = min(first, use.eqn), max(last, use.eqn)
        return self._sum((first, last, self._sizes(atom, (spec,))[0]) for (atom, spec), (first, last) in alive.items())

    def held(self) -> Limit:
        """Bytes that stay of each microbatch until its backward pass; any number is within the limit."""
        uses: dict[int, np.ndarray] = {}
        for decision, sizes in _held(self.step, self.decisions, self.mesh):
            uses[decision] = uses.get(decision, 0) + sizes
        return Limit(uses, np.inf)

    def limit(self, moment: int, budget: float, without: Collection[Var] = ()) -> Limit:
        """That the values alive at `moment`, some left out, and the copies made for it must fit into `budget` bytes."""
        uses: dict[int, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for life in self.lifetimes:
            if life.start <= moment <= life.end and life.var not in without:
                uses[life.decision] = uses.get(life.decision, 0) + life.sizes
        for use in self.decisions.uses:
            i, j = use.value.decision, use.decision
            if use.eqn != moment or (min(i, j), max(i, j)) not in self.decisions.edges:
                continue
            eqn = self.step.jaxpr.eqns[moment]
            sizes, relaid = self._sizes(self._moved(eqn.invars[use.operand]), use.required), is_relaid(eqn, use.operand)
            moved = np.array(
                [[relaid or present != required for required in use.required] for present in use.value.specs]
            )
            key, copied = ((i, j), moved * sizes) if i < j else ((j, i), (moved * sizes).T)
            pairs[key] = pairs.get(key, 0) + copied
        return Limit(uses, budget, pairs)

    def least(self) -> float:
        """Bytes that no choice gets below: at some moment, when every decision takes what is smallest then."""
        smallest = self._sum((life.start, life.end, life.sizes.min()) for life in self.lifetimes)
        return float(smallest.max())

    def _moved(self, atom: Atom) -> Atom:
        """What is copied for the sake of `atom`."""
        return atom if isinstance(atom, Literal) else self.moved_for.get(atom, atom)

    def _sizes(self, atom: Atom, specs: Specs) -> np.ndarray:
        return _sizes(atom, specs, self.mesh)

    def _sum(self, lives: Iterable[tuple[int, int, float]]) -> np.ndarray:
        change = np.zeros(self.moments + 1)
        for start, end, size in lives:
            change[start] += size
            change[end + 1] -= size
        return np.cumsum(change)[:-1]


def _lifetimes(step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> list[Lifetime]:
    reused = {step.jaxpr.outvars[o] for o in step.carried if isinstance(step.jaxpr.outvars[o], Var)}
    alive = dict(lifetimes(step))
    shown_by = {eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if is_view(eqn)}
    lives: list[tuple[Var, int, int]] = []
    for number, eqn in step.microbatching.marks if step.microbatching else ():
        # What microbatches add up to lives through their loop; the share of one is added as soon as it is made.
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            if isinstance(atom, Var) and atom not in step.jaxpr.invars:
                lives.append((atom, 0, number))
                while isinstance(share := shown_by.get(atom), Var):
                    atom = share
                if atom not in step.jaxpr.invars:
                    alive.pop(atom, None)
            _, until = alive.pop(var, (number, number))
            if until > number:
                lives.append((var, number + 1, until))
    lives += [(var, start, end) for var, (start, end) in alive.items() if var not in reused or not start]
    whole = {step.jaxpr.invars[i] for i in step.batch}  # all microbatches of it
    others = step.in_flight - 1
    found = [Lifetime(d, 0, len(step.jaxpr.eqns), others * s) for d, s in _held(step, decisions, mesh) if others]
    for var, start, end in lives:
        if (placement := decisions.placements.get(var)) is not None:
            sizes = _sizes(var, placement.specs, mesh) * (step.num_micro_batches if var in whole else 1)
            found.append(Lifetime(placement.decision, start, end, sizes, var))
    return found


def _held(step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> list[tuple[int, np.ndarray]]:
    """What each microbatch in flight holds: decisions, and bytes per option."""
    placed = ((var, decisions.placements.get(var)) for var in step.held)
    return [(p.decision, _sizes(var, p.specs, mesh)) for var, p in placed if p is not None]


def _sizes(atom: Atom, specs: Specs, mesh: LogicalMesh) -> np.ndarray:
    """Bytes on one device under each spec."""
    return _array_sizes(aval_of(atom).shape, aval_of(atom).dtype, specs, mesh)


@lru_cache(maxsize=1 << 14)
def _array_sizes(shape: tuple[int, ...], dtype: Any, specs: Specs, mesh: LogicalMesh) -> np.ndarray:
    return np.array(each_once(lambda spec: array_bytes(local_shape(shape, spec, mesh), dtype), specs), float)
