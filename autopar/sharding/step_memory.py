"""The memory constraint: bytes live on one device at each program point, by decisions.

A program point is an equation of the flat jaxpr. `autopar.sharding.value_lifetimes` says when
values are live, and `autopar.sharding.resharded_copies` when copies of them are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from jax.extend.core import Var

from autopar.ir.graph import Atom
from autopar.ir.spec import LogicalMesh, Spec, Specs
from autopar.ir.step_graph import StepGraph
from autopar.sharding.delayed_products import delayed_products, with_delays
from autopar.sharding.memory_roles import ValueRoles
from autopar.sharding.mesh_costs import is_local
from autopar.sharding.resharded_copies import ReshardedCopies
from autopar.sharding.selection_problem import CapacityConstraint
from autopar.sharding.step_decisions import Decisions, Use
from autopar.sharding.value_lifetimes import local_bytes, sizes_of, value_lifetimes
from simulator.buffer_packing import packed_bytes
from simulator.live_ranges import LiveRange, fullest, levels_by_point, live_bytes, roles_at_peak
from simulator.memory import Role


class StepMemory:
    """The memory of a step as a function of the choice.

    Attributes:
        step: the step.
        decisions: its decisions.
        mesh: the logical mesh.
        num_points: number of program points.
        lifetimes: all memory but resharded copies.
    """

    def __init__(self, step: StepGraph, decisions: Decisions, mesh: LogicalMesh) -> None:
        self.step, self.decisions, self.mesh = step, decisions, mesh
        self.num_points = len(step.jaxpr.eqns) + 1
        self.lifetimes = value_lifetimes(step, decisions, mesh)
        self._resharded = ReshardedCopies(step, decisions, mesh)
        self._delayed = delayed_products(step, decisions, mesh)

    def live_bytes(self, choice: Sequence[int]) -> np.ndarray:
        """Return the bytes live at each program point under a choice, shape (points,)."""
        return live_bytes(self._ranges(choice), self.num_points)

    def reserved_bytes(self, choice: Sequence[int]) -> float:
        """Return the bytes that the compiler reserves on one device under a choice.

        These are the bytes of inputs and outputs, and of the heap into which it packs all other
        values; the heap may have gaps. They are no less than the live bytes at the peak.
        """
        return _reserved([*self._ranges(choice)], self.num_points)

    def _ranges(self, choice: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Yield the first point, last point and bytes of all memory under a choice."""
        in_parts = self._in_parts(choice)
        values = (
            (start, end, life.sizes[choice[life.decision]])
            for life, start, end in with_delays(self.lifetimes, self._delayed, choice)
            if life.var not in in_parts
        )
        return chain(values, self._copies(choice))

    def _in_parts(self, choice: Sequence[int]) -> set[Atom]:
        """Return the fused values that each device computes only as far as it reads them."""
        return {
            var
            for var, uses in self._resharded.divisible.items()
            if all(self._is_part(use, choice) for use in uses)
        }

    def _is_part(self, use: Use, choice: Sequence[int]) -> bool:
        """Return whether a use reads a part of a value that a device has as a whole."""
        present = use.value.specs[choice[use.value.decision]]
        return _is_part(present, use.required[choice[use.decision]])

    def roles_at_peak(
        self, choice: Sequence[int], among: Sequence[int] = (), without: Collection[Var] = ()
    ) -> dict[Role, float]:
        """Return the bytes that the compiler reserves on one device, by role at the peak.

        Gaps between values count as temporaries.

        Args:
            choice: the option of each decision.
            among: the program points to consider; by default all.
            without: values that do not count.
        """
        ranges, num_points = [*self._live_ranges(choice, without)], self.num_points
        if among:
            ranges = _within(ranges, num_points, among)
            num_points = len(among) + 1
        roles = roles_at_peak(ranges, num_points)
        return _with_gaps(roles, _reserved(ranges, num_points) - sum(roles.values()))

    def levels(self, choice: Sequence[int]) -> list[dict[Role, float]]:
        """Return the bytes on one device by role at each program point under a choice.

        Gaps between values at the peak count as temporaries at each point.
        """
        ranges = [*self._live_ranges(choice)]
        levels = levels_by_point(ranges, self.num_points)
        gaps = _reserved(ranges, self.num_points) - sum(fullest(levels).values())
        return [_with_gaps(level, gaps) for level in levels]

    def _live_ranges(
        self, choice: Sequence[int], without: Collection[Var] = ()
    ) -> Iterator[LiveRange]:
        """Yield the live ranges of all values under a choice, except the values `without`."""
        roles = ValueRoles(self.step, self.decisions.roles)
        skipped = self._in_parts(choice).union(without)
        for life, start, end in with_delays(self.lifetimes, self._delayed, choice):
            if life.var is not None and life.var in skipped:
                continue
            role = life.role if life.var is None else roles.of(life.var, life.end)
            assert role is not None
            yield LiveRange(start, end, life.sizes[choice[life.decision]], role)
        for copy in self._copies(choice):
            yield LiveRange(*copy, "communication")

    def _copies(self, choice: Sequence[int]) -> Iterator[tuple[int, int, float]]:
        """Yield the first point, last point and bytes of each resharded copy.

        The compiler makes one copy per spec of a value, and keeps it from its first reader to its
        last, which may be a product that is added to a sum later.
        """
        points: dict[tuple[Atom, Spec], tuple[int, int]] = {}
        added = self._delayed if self.step.microbatching else ()
        runs_at: dict[int | None, int] = {
            product.eqn: product.at
            for product in added
            if product.is_delayed[choice[product.decision]]
        }
        for use, copies in self._resharded.of_uses:
            present = use.value.specs[choice[use.value.decision]]
            required = use.required[choice[use.decision]]
            for copy in copies:
                if copy.is_made(present, required):
                    key = copy.atom, required
                    last = max(copy.last, runs_at.get(use.eqn, 0))
                    start, end = points.get(key, (copy.first, last))
                    points[key] = min(start, copy.first), max(end, last)
        for (atom, spec), (first, last) in points.items():
            yield first, last, local_bytes(atom, (spec,), self.mesh)[0]

    def saved(self, values: Iterable[Var]) -> CapacityConstraint:
        """Return the bytes of values that a microbatch saves, without a bound."""
        uses: dict[int, np.ndarray] = {}
        for decision, sizes in sizes_of(values, self.decisions, self.mesh):
            uses[decision] = uses.get(decision, 0) + sizes
        return CapacityConstraint(uses, np.inf)

    def capacity_constraint(
        self,
        point: int,
        budget: float,
        without: Collection[Var] = (),
        with_parts: bool = False,
    ) -> CapacityConstraint:
        """Return the constraint that memory at a program point fits into `budget` bytes.

        Args:
            point: the program point.
            budget: bytes of one device.
            without: values that do not count.
            with_parts: whether fused values that are computed in parts do not count, so that no
                choice needs less than the constraint says. By default, they count as whole.
        """
        uses: dict[int, np.ndarray] = {}
        pairs: dict[tuple[int, int], np.ndarray] = {}

        def add(use: Use, num_bytes: np.ndarray) -> None:
            i, j = use.value.decision, use.decision
            key, num_bytes = ((i, j), num_bytes) if i < j else ((j, i), num_bytes.T)
            pairs[key] = pairs.get(key, 0) + num_bytes

        for life in self.lifetimes:
            if not life.start <= point <= life.end or life.var in without:
                continue
            readers = self._resharded.divisible.get(life.var, ()) if with_parts and life.var else ()
            reader = next(iter(readers), None)
            if reader is not None and self._has_edge(reader):
                add(reader, life.sizes[:, None] * _is_whole(reader.value.specs, reader.required))
            else:
                uses[life.decision] = uses.get(life.decision, 0) + life.sizes
        for use, copies in self._resharded.of_uses:
            if not self._has_edge(use):
                continue
            for copy in copies:
                if copy.first <= point <= copy.last:
                    sizes = local_bytes(copy.atom, use.required, self.mesh)
                    add(use, copy.made(use.value.specs, use.required) * sizes)
        return CapacityConstraint(uses, budget, pairs)

    def _has_edge(self, use: Use) -> bool:
        i, j = use.value.decision, use.decision
        return (min(i, j), max(i, j)) in self.decisions.edges

    def lower_bound(self, allowed: Sequence[np.ndarray] | None = None) -> float:
        """Return a lower bound of the peak: the smallest option of each decision at each point.

        The results of products that may be delayed count from the point to which they may be.

        Args:
            allowed: for each decision, which of its options count; by default all. At least one of
                each decision does.
        """
        starts: dict[Var | None, int] = {p.result: p.at for p in self._delayed}
        smallest = (
            (
                max(life.start, starts.get(life.var, 0)),
                life.end,
                0.0
                if life.var in self._resharded.divisible
                else (life.sizes if allowed is None else life.sizes[allowed[life.decision]]).min(),
            )
            for life in self.lifetimes
        )
        return float(live_bytes(smallest, self.num_points).max())


def _is_part(present: Spec, required: Spec) -> bool:
    return present != required and is_local(present, required)


@lru_cache(maxsize=1 << 14)
def _is_whole(specs: Specs, required: Specs) -> np.ndarray:
    """Return where a value is needed as it is present, or gathered; shape (specs, required)."""
    return np.array([[not _is_part(present, needed) for needed in required] for present in specs])


def _reserved(ranges: Sequence[tuple[Any, ...]], num_points: int) -> float:
    """Return the bytes that the compiler reserves for ranges of first point, last point and bytes.

    What is live at the last point is an input or output, which has memory of its own.
    """
    end = num_points - 1
    fixed = sum(size for _, last, size, *_ in ranges if last == end)
    packed = packed_bytes(live[:3] for live in ranges if live[1] < end)
    peak = live_bytes((live[:3] for live in ranges), num_points).max()
    return max(fixed + packed, float(peak))


def _within(
    ranges: Sequence[LiveRange], num_points: int, among: Sequence[int]
) -> Sequence[LiveRange]:
    """Return the live ranges within some program points, in positions of these points."""
    is_among = np.zeros(num_points + 1, int)
    is_among[np.asarray(among) + 1] = 1
    before = np.cumsum(is_among)
    clipped = (
        live._replace(first=int(before[live.first]), last=int(before[live.last + 1]) - 1)
        for live in ranges
    )
    return [live for live in clipped if live.first <= live.last]


def _with_gaps(level: Mapping[Role, float], gaps: float) -> dict[Role, float]:
    """Return the bytes by role; gaps of the heap count as temporaries."""
    if gaps <= 0:
        return dict(level)
    return {**level, "temporaries": level.get("temporaries", 0.0) + gaps}
