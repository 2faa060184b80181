"""The memory constraint: bytes live on one device at each program point, by decisions.

A program point is an equation of the flat jaxpr. Inputs are live during the whole step, and a
carried output reuses the memory of its input. Other values are live from the equation that computes
them to the last one that reads them, if they are stored at all (`autopar.xla_fusion`). Sums over
microbatches are live as long as their loop.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from autopar.ir import control_flow
from autopar.ir.array_sizes import array_bytes, value_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.host_memory import is_on_host
from autopar.ir.spec import LogicalMesh, Spec, Specs, local_shape
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.distinct_options import each_once
from autopar.sharding.memory_roles import ValueRoles
from autopar.sharding.mesh_costs import COMBINED_BYTES
from autopar.sharding.reshard_hoisting import passes_moves
from autopar.sharding.selection_problem import CapacityConstraint
from autopar.sharding.step_decisions import Decisions
from autopar.xla_fusion import is_relaid, is_view, lifetimes, readings
from simulator.live_ranges import LiveRange, levels_by_point, live_bytes, roles_at_peak
from simulator.memory import Role


@dataclass(frozen=True, eq=False, slots=True)
class Lifetime:
    """Memory that is in use from program point `start` to `end`, both included.

    Attributes:
        decision: the decision on which its size depends.
        start: first program point.
        end: last program point.
        sizes: bytes under each option of the decision.
        var: its value; None for activations of other microbatches and for gradients before their
            reduce_scatter.
        role: its role if `var` is None.
    """

    decision: int
    start: int
    end: int
    sizes: np.ndarray
    var: Var | None = None
    role: Role | None = None


class StepMemory:
    """The memory of a step as a function of the choice.

    Attributes:
        step: the step.
        decisions: its decisions.
        mesh: the logical mesh.
        num_points: number of program points.
        moved_for: for results whose resharding is hoisted, the operand that is resharded instead.
        lifetimes: all memory but resharded copies.
    """

    def __init__(self, step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> None:
        self.step, self.decisions, self.mesh = step, decisions, mesh
        self.num_points = len(step.jaxpr.eqns) + 1
        self.moved_for = {
            eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if passes_moves(eqn)
        }
        self.lifetimes = _lifetimes(step, decisions, mesh)

    def live_bytes(self, choice: Sequence[int]) -> np.ndarray:
        """Return the bytes live at each program point under a choice, shape (points,)."""
        values = (
            (life.start, life.end, life.sizes[choice[life.decision]]) for life in self.lifetimes
        )
        return live_bytes(chain(values, self._copies(choice)), self.num_points)

    def roles_at_peak(
        self, choice: Sequence[int], among: Sequence[int] = (), without: Collection[Var] = ()
    ) -> dict[Role, float]:
        """Return the bytes on one device by role at the peak under a choice.

        Args:
            choice: the option of each decision.
            among: the program points to consider; by default all.
            without: values that do not count.
        """
        return roles_at_peak(self._live_ranges(choice, without), self.num_points, among)

    def levels(self, choice: Sequence[int]) -> list[dict[Role, float]]:
        """Return the bytes on one device by role at each program point under a choice."""
        return levels_by_point(self._live_ranges(choice), self.num_points)

    def _live_ranges(
        self, choice: Sequence[int], without: Collection[Var] = ()
    ) -> Iterator[LiveRange]:
        """Yield all memory under a choice, except that of the values `without`."""
        roles = ValueRoles(self.step, self.decisions.roles)
        for life in self.lifetimes:
            if life.var is not None and life.var in without:
                continue
            role = life.role if life.var is None else roles.of(life.var, life.end)
            assert role is not None
            yield LiveRange(life.start, life.end, life.sizes[choice[life.decision]], role)
        for copy in self._copies(choice):
            yield LiveRange(*copy, "communication")

    def _copies(self, choice: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Yield the first point, last point and bytes of each resharded copy.

        The compiler makes one copy per spec of a value, and keeps it from its first reader to its
        last.
        """
        points: dict[tuple[Atom, Spec], tuple[int, int]] = {}
        for use in self.decisions.uses:
            if use.eqn is None:
                continue
            required = use.required[choice[use.decision]]
            eqn = self.step.jaxpr.eqns[use.eqn]
            present = use.value.specs[choice[use.value.decision]]
            if present == required and not is_relaid(eqn, use.operand):
                continue
            atom = self._moved(eqn.invars[use.operand])
            first, last = points.get((atom, required), (use.eqn, use.eqn))
            points[atom, required] = min(first, use.eqn), max(last, use.eqn)
        for (atom, spec), (first, last) in points.items():
            yield first, last, self._sizes(atom, (spec,))[0]

    def saved_for_backward(self) -> CapacityConstraint:
        """Return the bytes per microbatch that are saved for its backward pass, without a bound."""
        uses: dict[int, np.ndarray] = {}
        for decision, sizes in _saved(self.step, self.decisions, self.mesh):
            uses[decision] = uses.get(decision, 0) + sizes
        return CapacityConstraint(uses, np.inf)

    def capacity_constraint(
        self, point: int, budget: float, without: Collection[Var] = ()
    ) -> CapacityConstraint:
        """Return the constraint that memory at a program point fits into `budget` bytes.

        Args:
            point: the program point.
            budget: bytes of one device.
            without: values that do not count.
        """
        uses: dict[int, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for life in self.lifetimes:
            if life.start <= point <= life.end and life.var not in without:
                uses[life.decision] = uses.get(life.decision, 0) + life.sizes
        for use in self.decisions.uses:
            i, j = use.value.decision, use.decision
            if use.eqn != point or (min(i, j), max(i, j)) not in self.decisions.edges:
                continue
            eqn = self.step.jaxpr.eqns[point]
            sizes = self._sizes(self._moved(eqn.invars[use.operand]), use.required)
            relaid = is_relaid(eqn, use.operand)
            moved = np.array(
                [
                    [relaid or present != required for required in use.required]
                    for present in use.value.specs
                ]
            )
            key, copied = ((i, j), moved * sizes) if i < j else ((j, i), (moved * sizes).T)
            pairs[key] = pairs.get(key, 0) + copied
        return CapacityConstraint(uses, budget, pairs)

    def lower_bound(self) -> float:
        """Return a lower bound of the peak: the smallest option of each decision at each point."""
        smallest = ((life.start, life.end, life.sizes.min()) for life in self.lifetimes)
        return float(live_bytes(smallest, self.num_points).max())

    def _moved(self, atom: Atom) -> Atom:
        """Return the value that is copied when `atom` is resharded."""
        return atom if isinstance(atom, Literal) else self.moved_for.get(atom, atom)

    def _sizes(self, atom: Atom, specs: Specs) -> np.ndarray:
        return _sizes(atom, specs, self.mesh)


def _lifetimes(step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> list[Lifetime]:
    """Return the lifetimes of all values that are stored."""
    reused = {step.jaxpr.outvars[o] for o in step.carried if isinstance(step.jaxpr.outvars[o], Var)}
    alive = dict(lifetimes(step))
    shown_by = {eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if is_view(eqn)}
    if step.microbatching is None:
        _postpone(step, decisions, mesh, alive, shown_by)
    lives: list[tuple[Var, int, int]] = []
    for number, eqn in step.microbatching.marks if step.microbatching else ():
        # A sum over microbatches is live during their loop; its addends are added in place.
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            if aval_of(atom).shape != aval_of(var).shape:  # rows are written into the total
                alive[var] = 0, alive.pop(var, (number, number))[1]
                continue
            if isinstance(atom, Var) and atom not in step.jaxpr.invars:
                lives.append((atom, 0, number))
                while isinstance(share := shown_by.get(atom), Var):
                    atom = share
                if atom not in step.jaxpr.invars:
                    alive.pop(atom, None)
            _, until = alive.pop(var, (number, number))
            if until > number:
                lives.append((var, number + 1, until))
    lives += [
        (var, start, end) for var, (start, end) in alive.items() if var not in reused or not start
    ]
    batch = {step.jaxpr.invars[i] for i in step.batch}  # all microbatches of it are live
    others = step.in_flight - 1
    end = len(step.jaxpr.eqns)
    saved = _saved(step, decisions, mesh) if others else ()
    memory = [Lifetime(d, 0, end, others * sizes, role="activations") for d, sizes in saved]
    for var, start, end in lives:
        if (placement := decisions.placements.get(var)) is not None:
            sizes = _sizes(var, placement.specs, mesh) * (
                step.num_micro_batches if var in batch else 1
            )
            memory.append(Lifetime(placement.decision, start, end, sizes, var))
    return memory + list(_unscattered(step, decisions, mesh, alive))


def _postpone(
    step: StepGraph,
    decisions: Decisions,
    mesh: LogicalMesh,
    alive: dict[Var, tuple[int, int]],
    shown_by: Mapping[Var, Atom],
) -> None:
    """Compute a product when it is first read if its operands are smaller than its result.

    XLA schedules for least memory: gradients of large weights from small batches are computed right
    before their update.

    Args:
        step: the step.
        decisions: its decisions.
        mesh: the logical mesh.
        alive: first and last program point of each stored value; changed.
        shown_by: for each view, the value that it views.
    """
    reads, loops = readings(step), control_flow.spans(step.jaxpr.eqns).values()

    def size(var: Var, of: Callable[[np.ndarray], float]) -> float:
        placement = decisions.placements.get(var)
        return of(_sizes(var, placement.specs, mesh)) if placement else 0.0

    for number, eqn in enumerate(step.jaxpr.eqns):
        result = eqn.outvars[0] if eqn.outvars else None
        until, last = reads.get(result, (number, number)) if result else (number, number)
        if record_of(eqn).fusion != "contraction" or result not in alive or until <= number + 1:
            continue
        if any(start <= number <= end or start <= until <= end for start, end in loops):
            continue
        operands = {_base(atom, shown_by) for atom in eqn.invars if isinstance(atom, Var)}
        longer = [var for var in operands if var in alive and alive[var][1] < until]
        if sum(size(var, np.max) for var in longer) < size(result, np.min):
            reader, last_reader = (decisions.leaders.get(n, n) for n in (until, last))
            in_one_kernel = reader == last_reader and alive[result][1] == last
            alive[result] = (until, until if in_one_kernel else alive[result][1])
            alive.update((var, (alive[var][0], until)) for var in longer)


def _base(var: Var, shown_by: Mapping[Var, Atom]) -> Var:
    while isinstance(shown := shown_by.get(var), Var):
        var = shown
    return var


def _unscattered(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh, alive: Mapping[Var, tuple[int, int]]
) -> Iterator[Lifetime]:
    """Yield gradients before their reduce_scatter.

    Each is live until the last one that XLA combines it with is computed.
    """
    groups: list[list[tuple[int, int, int, np.ndarray]]] = []
    room = 0.0
    for number, decision, sizes in decisions.scattered:
        var = step.jaxpr.eqns[number].outvars[0]
        result = value_bytes(var) / mesh.num_devices
        if result > room:
            groups.append([])
            room = COMBINED_BYTES
        room -= result
        groups[-1].append((number, alive.get(var, (number, 0))[0], decision, sizes))
    for group in groups:
        late = all(start > number for number, start, _, _ in group)
        last = (min if late else max)(start for _, start, _, _ in group)
        for _, start, decision, sizes in group:
            if sizes.any():
                yield Lifetime(decision, min(start, last), last, sizes, role="gradients")


def _saved(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh
) -> list[tuple[int, np.ndarray]]:
    """Return decisions, and bytes per option, of what a microbatch saves for its backward pass."""
    placed = ((var, decisions.placements.get(var)) for var in step.saved_for_backward)
    return [(p.decision, _sizes(var, p.specs, mesh)) for var, p in placed if p is not None]


def _sizes(atom: Atom, specs: Specs, mesh: LogicalMesh) -> np.ndarray:
    """Bytes on one device under each spec."""
    if is_on_host(atom):
        return np.zeros(len(specs))
    return _array_sizes(aval_of(atom).shape, aval_of(atom).dtype, specs, mesh)


@lru_cache(maxsize=1 << 14)
def _array_sizes(shape: tuple[int, ...], dtype: Any, specs: Specs, mesh: LogicalMesh) -> np.ndarray:
    return np.array(
        each_once(lambda spec: array_bytes(local_shape(shape, spec, mesh), dtype), specs), float
    )
