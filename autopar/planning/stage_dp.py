"""Stage construction by an exact dynamic program over suffixes of the layers.

A state is (first layer, devices left, number of stages). Each state keeps its Pareto front of (sum,
slowest, once per step, seconds of the first stage), because one more stage in front can make any of
these the better one. Suffixes are extended best first: the bound of a suffix adds the least that
the layers before it can cost (`stage_bounds`). So only states near the optimum are visited, and
exact costs are requested only where the optimum may depend on them.
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
"""Factor within which sums of the same numbers in another order are equal."""


def solve_stages(problem: StageProblem, limit: float = np.inf) -> StageSolution:
    """Return the stages with the least predicted time of a step.

    Args:
        problem: layers, devices and costs of stages.
        limit: seconds of a step; only better stages count.

    Raises:
        NoStagesError: no stages use the devices within their memory, or none are below the limit.
    """
    table = CostTable(problem)
    best: _Suffix | None = None
    for in_flight, totals in _memory_profiles(problem):
        best = _StageSearch(table, in_flight, totals, best.seconds if best else limit).run() or best
    if best is None:
        pools = ", ".join(
            f"{pool.hosts} x {pool.devices_per_host} devices" for pool in problem.pools
        )
        submeshes = ", ".join(map(str, problem.submeshes))
        ways = f"cut {problem.num_layers} layers into stages for {pools} with submeshes {submeshes}"
        if limit < np.inf:
            raise NoStagesError(
                f"no way to {ways} fits in memory and takes less than {limit:.4g} s"
            )
        raise NoStagesError(
            f"no way to {ways} fits in memory and uses all devices; use more layers, more devices,"
            " smaller microbatches, remat or leave_idle"
        )
    return StageSolution(tuple(best.stages()), best.seconds, table.num_costs)


def _memory_profiles(problem: StageProblem) -> list[tuple[tuple[int, ...], set[int]]]:
    """Return the microbatches in flight by number of later stages, for each total number of stages.

    In most schedules the total does not matter, and there is one profile for all totals.

    Returns:
        Pairs of a profile and the totals that it holds for.
    """
    max_stages = min(problem.num_layers, sum(pool.num_devices for pool in problem.pools))
    profiles: list[tuple[tuple[int, ...], set[int]]] = []
    for num_stages in range(max_stages, problem.min_stages - 1, -1):
        profile = tuple(problem.in_flight(later, num_stages) for later in range(num_stages))
        for longer, totals in profiles:
            if longer[:num_stages] == profile:
                totals.add(num_stages)
                break
        else:
            profiles.append((profile, {num_stages}))
    return profiles[::-1]


@dataclass(frozen=True, slots=True)
class _Suffix:
    """The stages of the layers from `first` on.

    Attributes:
        first: first layer of the first stage.
        left: devices of each pool not used yet, in units of `CostTable`.
        count: number of stages.
        total: seconds of all stages and transfers.
        slowest: first maximum of the objective.
        once: second maximum of the objective.
        parts: sorted numbers of the submeshes used in pools where the number of devices left does
            not say which other submeshes fit.
        stage: the first stage.
        after: the stages after it.
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
        """Seconds that the objective adds to the sum."""
        return self.slowest + self.once

    @property
    def seconds(self) -> float:
        """Objective of these stages."""
        return self.total + self.rest

    @property
    def front(self) -> float:
        """Seconds of the first stage."""
        return self.stage.cost.seconds if self.stage else 0.0

    def stages(self) -> Iterator[PlacedStage]:
        """Yield the stages in order."""
        if self.stage and self.after:
            yield self.stage
            yield from self.after.stages()


class _StageSearch:
    """A best-first search for stages, for one profile of microbatches in flight."""

    def __init__(
        self, table: CostTable, in_flight: Sequence[int], totals: set[int], limit: float
    ) -> None:
        self.table = table
        self.problem = table.problem
        self.in_flight = in_flight
        self.totals = totals
        self.limit = limit
        self.packed_pools = {
            i
            for i, pool in enumerate(self.problem.pools)
            if not counting_suffices(pool, [m for m in self.problem.submeshes if m.pool == i])
        }

    def run(self) -> _Suffix | None:
        """Return the best stages; None if none are better than the limit."""
        if not (self.table.can_use_all or self.problem.leave_idle):
            return None
        while isinstance(outcome := self._run(), _Stale):
            pass
        return outcome

    def _run(self) -> "_Suffix | _Stale | None":
        """Search once.

        Returns:
            The best stages or None, or `_Stale` once so many exact costs exceed their bounds that a
            new search with better bounds is faster.
        """
        surprises = self.table.num_surprises
        patience = max(8, surprises)
        self.remainders: dict[int, Remainder] = {}
        order = count()
        heap: list[tuple[float, int, int, _Suffix | tuple[_Suffix, int, int]]] = []

        def push(bound: float, first: int, entry: "_Suffix | tuple[_Suffix, int, int]") -> None:
            if bound < self.limit:
                heappush(heap, (bound, first, next(order), entry))

        fronts: defaultdict[tuple, list[tuple[float, ...]]] = defaultdict(list)
        empty = _Suffix(self.problem.num_layers, self.table.devices)
        push(self._remainder(0).bound(empty.first, empty.left, 0.0, 0.0), empty.first, empty)
        while heap:
            _, _, _, entry = heappop(heap)
            if isinstance(entry, tuple):  # the first stage has a bound only, no exact cost
                after, start, mesh = entry
                for cost in self.table.exact(mesh, start, after.first):
                    if suffix := self._extended(after, start, mesh, cost):
                        remainder = self._remainder(suffix.count)
                        bound = remainder.bound(
                            suffix.first, suffix.left, suffix.total, suffix.rest
                        )
                        push(bound, suffix.first, suffix)
                if self.table.num_surprises - surprises >= patience:
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
        """Return bounds for the layers before a suffix of `later` stages.

        Numbers of stages with about the same microbatches in flight share their bounds.
        """
        in_flight = min(self.in_flight[later:], default=self.in_flight[-1])
        dropped_bits = max(0, in_flight.bit_length() - 3)  # all but the three leading ones
        coarse = in_flight - in_flight % (1 << dropped_bits)
        if coarse not in self.remainders:
            level = self.table.level(coarse)
            equal = (
                remainder
                for other, remainder in self.remainders.items()
                if np.array_equal(self.table.level(other), level)
            )
            self.remainders[coarse] = next(equal, None) or Remainder.of(self.table, coarse)
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
        """Yield first layers of a stage on `mesh` before `after`, with bounds of their plans."""
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
        left = self.table.without(after.left, mesh)
        parts = self._parts(after, mesh)
        if left is None or parts is None:
            return None
        if not self.table.fits(mesh, cost, self.in_flight[after.count]):
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
        """Return the first maximum of the objective with one more stage in front of `after`.

        Args:
            after: the stages behind the new one.
            transfer: seconds of the transfer between them.
            seconds: seconds of the new stage, a number or an array of alternatives.
        """
        repeats = self.table.repeats
        in_flight = self.in_flight[after.count]
        slowest = np.maximum(max(after.slowest, repeats * transfer / 2), repeats * seconds)
        slowest = np.maximum(
            slowest, self.problem.num_returns(in_flight) * (after.total + transfer + seconds)
        )
        if after.count:
            turns = self.problem.num_turns(in_flight, self.in_flight[after.count - 1])
            slowest = np.maximum(slowest, turns * (after.front + transfer + seconds))
        return slowest

    def _parts(self, after: _Suffix, mesh: int) -> tuple[int, ...] | None:
        """Return `after.parts` with one more submesh; None if the hosts cannot hold all of them."""
        pool = self.problem.submeshes[mesh].pool
        if pool not in self.packed_pools:
            return after.parts
        parts = tuple(sorted((*after.parts, mesh)))
        submeshes = [self.problem.submeshes[i] for i in parts]
        in_pool = [submesh for submesh in submeshes if submesh.pool == pool]
        return parts if fits(self.problem.pools[pool], in_pool) else None


@dataclass(frozen=True, slots=True)
class _Stale:
    """The outcome of a search whose bounds are worth renewing."""
