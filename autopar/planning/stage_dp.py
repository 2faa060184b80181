"""Stage construction by an exact dynamic program.

Its states are suffixes of the layers on some of the devices: (first layer, devices left, number of stages). Each keeps its Pareto
front of (sum, slowest, once per step, first stage), as one more stage in front can make any of them the better one. States are filled
best first: the bound of a suffix adds what the layers before it cost at least (`stage_bounds`), so that only states near the optimum
are visited and exact costs are asked for only where the optimum may depend on them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import isinf
from typing import Any

import numpy as np

from autopar.pipeline.submeshes import counting_suffices, fits
from autopar.planning.stage_bounds import CostTable, Remainder
from autopar.planning.stage_problem import (
    NoStagesError,
    PlacedStage,
    StageCost,
    StageProblem,
    StageSolution,
)

_SAME = 1 + 1e-12
"""Sums of the same numbers in another order are the same."""


def construct_stages(problem: StageProblem, limit: float = np.inf) -> StageSolution:
    """The stages with the least predicted time of a step, if that is below `limit` seconds.

    Raises:
        NoStagesError: no cut uses the devices within their memory, or is below the limit.
    """
    table = CostTable(problem)
    best: _Suffix | None = None
    for in_flight, totals in _memory_profiles(problem):
        best = _Search(table, in_flight, totals, best.seconds if best else limit).run() or best
    if best is None:
        pools = ", ".join(
            f"{pool.hosts} x {pool.devices_per_host} devices" for pool in problem.pools
        )
        raise NoStagesError(
            f"no way to cut {problem.num_layers} layers into stages for {pools} with submeshes "
            f"{', '.join(map(str, problem.submeshes))} fits in memory and uses all devices; "
            "use more layers, more devices, smaller microbatches, remat or leave_idle"
        )
    return StageSolution(tuple(best.stages()), best.seconds, table.num_costs)


def _memory_profiles(problem: StageProblem) -> list[tuple[tuple[int, ...], set[int]]]:
    """Microbatches in flight by number of later stages, with the numbers of stages for which this holds.

    In most schedules the number of stages in all does not matter, and there is one profile.
    """
    most = min(problem.num_layers, sum(pool.num_devices for pool in problem.pools))
    profiles: list[tuple[tuple[int, ...], set[int]]] = []
    for stages in range(most, 0, -1):
        profile = tuple(problem.in_flight(later, stages) for later in range(stages))
        for longer, totals in profiles:
            if longer[:stages] == profile:
                totals.add(stages)
                break
        else:
            profiles.append((profile, {stages}))
    return profiles[::-1]


@dataclass(frozen=True, slots=True)
class _Suffix:
    """Stages for the layers from `first` on.

    Attributes:
        left: devices not used yet, in units of `CostTable`.
        total: seconds of all stages and transfers.
        slowest: the first maximum of the objective; once: the second.
        parts: sizes of the submeshes used, of pools where counting devices does not tell what else fits.
    """

    first: int
    left: tuple[int, ...]
    count: int = 0
    total: float = 0.0
    slowest: float = 0.0
    once: float = 0.0
    parts: tuple[int, ...] = ()
    stage: PlacedStage | None = None
    after: "_Suffix | None" = None

    @property
    def rest(self) -> float:
        """What the objective adds to the sum."""
        return self.slowest + self.once

    @property
    def seconds(self) -> float:
        return self.total + self.rest

    @property
    def front(self) -> float:
        """Seconds of the first of the stages."""
        return self.stage.cost.seconds if self.stage else 0.0

    def stages(self) -> Iterator[PlacedStage]:
        if self.stage and self.after:
            yield self.stage
            yield from self.after.stages()


class _Search:
    def __init__(
        self, table: CostTable, in_flight: Sequence[int], totals: set[int], limit: float
    ) -> None:
        self.table, self.problem = table, table.problem
        self.in_flight, self.totals = in_flight, totals
        self.limit = limit
        pools = enumerate(self.problem.pools)
        self.awkward = {
            i
            for i, pool in pools
            if not counting_suffices(pool, [m for m in self.problem.submeshes if m.pool == i])
        }

    def run(self) -> _Suffix | None:
        """The best plan, or None if it is not better than the one known before."""
        if not (self.table.can_use_all or self.problem.leave_idle):
            return None
        while isinstance(outcome := self._run(), _Stale):
            pass
        return outcome

    def _run(self) -> "_Suffix | _Stale | None":
        """Best-first search; gives up once so many costs turned out larger than their bounds that these are worth renewing."""
        known = self.table.num_surprises
        patience = max(8, known)
        self.remainders: dict[int, Remainder] = {}
        order = count()
        heap: list[tuple[float, int, int, _Suffix | tuple[_Suffix, int, int]]] = []

        def push(bound: float, first: int, entry: "_Suffix | tuple[_Suffix, int, int]") -> None:
            if bound < self.limit:
                heappush(heap, (bound, first, next(order), entry))

        fronts: defaultdict[tuple, list[tuple[float, ...]]] = defaultdict(list)
        nothing = _Suffix(self.problem.num_layers, self.table.devices)
        push(
            self._remainder(0).bound(nothing.first, nothing.left, 0.0, 0.0), nothing.first, nothing
        )
        while heap:
            _, _, _, entry = heappop(heap)
            if isinstance(entry, tuple):  # the last stage has a bound only: find out what it costs
                after, start, mesh = entry
                for cost in self.table.exact(mesh, start, after.first):
                    if suffix := self._extended(after, start, mesh, cost):
                        remainder = self._remainder(suffix.count)
                        bound = remainder.bound(
                            suffix.first, suffix.left, suffix.total, suffix.rest
                        )
                        push(bound, suffix.first, suffix)
                if self.table.num_surprises - known >= patience:
                    return _Stale()
            elif not self._dominated(fronts[self._state(entry)], entry):
                if entry.first == 0:
                    if entry.count in self.totals:
                        return entry
                    continue
                for mesh in self.table.usable:
                    for start, bound in self._children(entry, mesh):
                        push(bound, start, (entry, start, mesh))
        return None

    def _remainder(self, later: int) -> Remainder:
        """Bounds for the layers before a suffix of `later` stages; the same ones serve several numbers of stages."""
        in_flight = min(self.in_flight[later:], default=self.in_flight[-1])
        coarse = in_flight - in_flight % (
            1 << max(0, in_flight.bit_length() - 3)
        )  # three leading bits
        if coarse not in self.remainders:
            level = self.table.level(coarse)
            same = (
                self.remainders[k]
                for k in self.remainders
                if np.array_equal(self.table.level(k), level)
            )
            self.remainders[coarse] = next(same, None) or Remainder.of(self.table, coarse)
        return self.remainders[coarse]

    def _state(self, suffix: _Suffix) -> tuple:
        neighbour = suffix.stage.submesh if suffix.stage and self.problem.transfer else None
        return suffix.first, suffix.left, suffix.count, suffix.parts, neighbour

    def _dominated(self, front: list[tuple[float, ...]], suffix: _Suffix) -> bool:
        terms = (
            suffix.total,
            suffix.slowest,
            suffix.once,
            suffix.front if self.problem.transfer else 0.0,
        )
        if any(all(a <= b * _SAME for a, b in zip(other, terms, strict=True)) for other in front):
            return True
        front.append(terms)
        return False

    def _transfer(self, after: _Suffix, mesh: int) -> float:
        if after.stage is None or self.problem.transfer is None:
            return 0.0
        destination = after.stage.submesh
        before = after.left[destination.pool] * self.table.units[destination.pool]
        return self.problem.transfer(after.first, self.problem.submeshes[mesh], destination, before)

    def _children(self, after: _Suffix, mesh: int) -> Iterator[tuple[int, float]]:
        """First layers of a stage on `mesh` in front of `after`, and a bound of every plan with it."""
        left = self.table.without(after.left, mesh)
        if left is None or after.count >= len(self.in_flight) or self._parts(after, mesh) is None:
            return
        transfer = self._transfer(after, mesh)
        if isinf(transfer):
            return
        seconds, busy = self.table.level(self.in_flight[after.count])[
            :, mesh, : after.first, after.first
        ]
        starts = np.flatnonzero(np.isfinite(seconds))
        seconds, busy = seconds[starts], busy[starts]
        rest = np.maximum(busy, self._slowest(after, transfer, seconds) + after.once)
        remainder = self._remainder(after.count + 1)
        bounds = remainder.bounds(starts, left, after.total + transfer + seconds, rest)
        for i in np.flatnonzero(bounds < self.limit):
            yield int(starts[i]), float(bounds[i])

    def _extended(self, after: _Suffix, start: int, mesh: int, cost: StageCost) -> _Suffix | None:
        left, parts = self.table.without(after.left, mesh), self._parts(after, mesh)
        if (
            left is None
            or parts is None
            or not self.table.fits(mesh, cost, self.in_flight[after.count])
        ):
            return None
        transfer = self._transfer(after, mesh)
        return _Suffix(
            first=start,
            left=left,
            count=after.count + 1,
            total=after.total + transfer + cost.seconds,
            slowest=float(self._slowest(after, transfer, cost.seconds)),
            once=max(after.once, cost.once_seconds),
            parts=parts,
            stage=PlacedStage(start, after.first, self.problem.submeshes[mesh], cost),
            after=after,
        )

    def _slowest(self, after: _Suffix, transfer: float, seconds: Any) -> Any:
        """The first maximum of the objective with a stage of so many seconds, or each of several, in front of `after`."""
        repeats, in_flight = self.table.repeats, self.in_flight[after.count]
        slowest = np.maximum(max(after.slowest, repeats * transfer / 2), repeats * seconds)
        slowest = np.maximum(
            slowest, self.problem.returns(in_flight) * (after.total + transfer + seconds)
        )
        if after.count:
            turns = self.problem.turns(in_flight, self.in_flight[after.count - 1])
            slowest = np.maximum(slowest, turns * (after.front + transfer + seconds))
        return slowest

    def _parts(self, after: _Suffix, mesh: int) -> tuple[int, ...] | None:
        """The indices of the submeshes in awkward pools, sorted; None if the hosts can't hold them all."""
        pool = self.problem.submeshes[mesh].pool
        if pool not in self.awkward:
            return after.parts
        parts = tuple(sorted((*after.parts, mesh)))
        mine = [self.problem.submeshes[i] for i in parts if self.problem.submeshes[i].pool == pool]
        return parts if fits(self.problem.pools[pool], mine) else None


@dataclass(frozen=True, slots=True)
class _Stale:
    """The bounds are worth renewing."""
