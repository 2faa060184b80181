"""Stage construction by an exact dynamic program over suffixes of the layers.

A state is (first layer, devices left, number of stages). Each state keeps its Pareto front of (sum,
slowest, once per step, seconds of the first stage), because one more stage in front can make any of
these the better one. Suffixes are extended best first: the bound of a suffix adds the least that
the layers before it can cost (`stage_bounds`). So only states near the optimum are visited, and
exact costs are requested only where the optimum may depend on them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
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
        raise _no_stages(problem, limit)
    return StageSolution(tuple(best.stages()), best.seconds, table.num_costs)


def _no_stages(problem: StageProblem, limit: float) -> NoStagesError:
    """Return the error of a problem that no stages solve in less than `limit` seconds."""
    num_devices = sum(pool.num_devices for pool in problem.pools)
    if problem.min_stages > min(problem.num_layers, num_devices):
        return NoStagesError(
            f"{problem.num_layers} layer(s) and {num_devices} device(s) are too few for"
            f" {problem.min_stages} stages; use more layers or devices, or a smaller min_stages"
        )
    pools = ", ".join(f"{pool.hosts} x {pool.devices_per_host} devices" for pool in problem.pools)
    submeshes = ", ".join(map(str, problem.submeshes))
    ways = f"cut {problem.num_layers} layers into stages for {pools} with submeshes {submeshes}"
    limit = min(limit, problem.limit)
    if limit < np.inf:
        return NoStagesError(f"no way to {ways} fits in memory and takes less than {limit:.4g} s")
    return NoStagesError(
        f"no way to {ways} fits in memory and uses all devices; use more layers, more devices,"
        " smaller microbatches, remat or leave_idle"
    )


def _memory_profiles(problem: StageProblem) -> list[tuple[tuple[int, ...], set[int]]]:
    """Return the microbatches in flight by number of later stages, for each total number of stages.

    In most schedules the total does not matter, and there is one profile for all totals.

    Returns:
        Pairs of a profile and the totals that it holds for.
    """
    profiles: list[tuple[tuple[int, ...], set[int]]] = []
    for num_stages in range(problem.max_stages, problem.min_stages - 1, -1):
        profile = tuple(problem.in_flight(later, num_stages) for later in range(num_stages))
        for longer, totals in profiles:
            if longer[:num_stages] == profile:
                totals.add(num_stages)
                break
        else:
            profiles.append((profile, {num_stages}))
    return profiles[::-1]


type _Terms = tuple[float, float, float, float]
"""Sum, slowest, once per step and seconds of the first stage; see `_StageSearch._terms`."""


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
        mesh: number of the first stage's submesh; -1 without stages.
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
    mesh: int = -1
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


@dataclass(slots=True)
class _Extensions:
    """The stages that may come in front of a suffix, those with the least bounds first.

    They have bounds only, no exact costs.

    Attributes:
        after: the suffix.
        stages: first layer and number of the submesh of each stage, and the bound of its plans.
        position: number of the first stage that was not tried yet.
    """

    after: _Suffix
    stages: Sequence[tuple[int, int, float]]
    position: int = 0


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
        self.coarse_in_flight = [
            _coarse(min(in_flight[later:], default=in_flight[-1]))
            for later in range(len(in_flight) + 1)
        ]
        self.used = np.zeros((len(self.problem.pools), len(self.problem.submeshes)), int)
        for mesh, submesh in enumerate(self.problem.submeshes):
            self.used[submesh.pool, mesh] = table.sizes[mesh]
        self._known_transfers: dict[tuple[int, int, int], np.ndarray] = {}
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
        self.remainders: dict[int, list[Remainder]] = {}
        order = count()
        heap: list[tuple[float, int, int, _Suffix | _Extensions]] = []

        def push(suffix: _Suffix) -> None:
            remainder = self._remainder(suffix.count)
            bound = remainder.bound(suffix.first, suffix.left, suffix.total, suffix.rest)
            if bound < self.limit:
                heappush(heap, (bound, suffix.first, next(order), suffix))

        def push_next(extensions: _Extensions) -> None:
            if extensions.position < len(extensions.stages):
                start, _, bound = extensions.stages[extensions.position]
                heappush(heap, (bound, start, next(order), extensions))

        fronts: defaultdict[tuple, list[_Terms]] = defaultdict(list)
        push(_Suffix(self.problem.num_layers, self.table.devices))
        while heap:
            _, _, _, entry = heappop(heap)
            if isinstance(entry, _Extensions):
                start, mesh, _ = entry.stages[entry.position]
                entry.position += 1
                push_next(entry)
                for cost in self.table.exact(mesh, start, entry.after.first):
                    suffix = self._extended(entry.after, start, mesh, cost)
                    if suffix and not self._is_dominated(fronts[self._state(suffix)], suffix):
                        push(suffix)
                if self.table.num_surprises - surprises >= patience:
                    return _Stale()
                continue
            front = fronts[self._state(entry)]
            if self._is_dominated(front, entry):
                continue
            front.append(self._terms(entry))
            if entry.first:
                push_next(_Extensions(entry, self._stages_before(entry)))
            elif entry.count in self.totals:
                return entry
        return None

    def _remainder(self, later: int) -> Remainder:
        """Return bounds for the layers before a suffix of `later` stages.

        Numbers of stages with about the same microbatches in flight share their bounds. Where the
        microbatches in flight are for few stages only, so are the bounds.
        """
        coarse = self.coarse_in_flight[later]
        if coarse not in self.remainders:
            level = self.table.level(coarse)
            equal = (
                remainders
                for other, remainders in self.remainders.items()
                if np.array_equal(self.table.level(other), level)
            )
            self.remainders[coarse] = next(equal, None) or self._remainders(coarse)
        remainders = self.remainders[coarse]
        return remainders[max(self.totals) - later] if len(remainders) > 1 else remainders[0]

    def _remainders(self, in_flight: int) -> list[Remainder]:
        """Return bounds for any number of stages, or for each number that may be left."""
        remainder = Remainder.of(self.table, in_flight)
        most = max(self.totals)
        if most == self.problem.max_stages:
            return [remainder]
        return remainder.in_stages(self.table, in_flight, most)

    def _state(self, suffix: _Suffix) -> tuple:
        """Return what the stages before a suffix depend on, beside its terms."""
        neighbour = suffix.mesh if self.problem.transfer else -1
        return suffix.first, suffix.left, suffix.count, suffix.parts, neighbour

    def _terms(self, suffix: _Suffix) -> _Terms:
        """Return what makes a suffix better than others of its state."""
        front = suffix.front if self.problem.transfer else 0.0
        return suffix.total, suffix.slowest, suffix.once, front

    def _is_dominated(self, front: list[_Terms], suffix: _Suffix) -> bool:
        """Return whether a suffix is nowhere better than one in the front of its state."""
        total, slowest, once, first = (term * _SAME for term in self._terms(suffix))
        for other in front:
            if other[0] <= total and other[1] <= slowest and other[2] <= once and other[3] <= first:
                return True
        return False

    def _transfers(self, after: _Suffix) -> np.ndarray:
        """Return the seconds of the transfer from a stage on each submesh to `after`."""
        if after.stage is None or self.problem.transfer is None:
            return np.zeros(len(self.problem.submeshes))
        destination = after.stage.submesh
        left = after.left[destination.pool]
        key = after.first, after.mesh, left
        if key not in self._known_transfers:
            before = left * self.table.units[destination.pool]
            self._known_transfers[key] = np.array(
                [
                    self.problem.transfer(after.first, source, destination, before)
                    for source in self.problem.submeshes
                ]
            )
        return self._known_transfers[key]

    def _stages_before(self, after: _Suffix) -> list[tuple[int, int, float]]:
        """Return the stages that may come in front of a suffix; see `_Extensions`."""
        if after.count >= len(self.in_flight):
            return []
        transfers = self._transfers(after)
        is_possible = [
            transfers[mesh] < inf
            and self.table.sizes[mesh] <= after.left[self.problem.submeshes[mesh].pool]
            and self._parts(after, mesh) is not None
            for mesh in self.table.usable
        ]
        meshes = np.array(self.table.usable, int)[is_possible]
        level = self.table.level(self.in_flight[after.count])[:, :, : after.first, after.first]
        of_stage, starts = np.nonzero(np.isfinite(level[0, meshes]))
        meshes = meshes[of_stage]
        seconds, busy = level[:, meshes, starts]
        transfer = transfers[meshes]
        slowest = self._slowest(after, transfer, seconds, np.maximum)
        rest = slowest + after.once
        if not self.problem.few_bubbles:
            rest = np.maximum(busy, rest)
        left = [devices - used[meshes] for devices, used in zip(after.left, self.used, strict=True)]
        remainder = self._remainder(after.count + 1)
        bounds = remainder.bounds(starts, left, after.total + transfer + seconds, rest)
        order = np.lexsort((starts, bounds))
        order = order[: np.searchsorted(bounds[order], self.limit)]
        return list(
            zip(starts[order].tolist(), meshes[order].tolist(), bounds[order].tolist(), strict=True)
        )

    def _extended(self, after: _Suffix, start: int, mesh: int, cost: StageCost) -> _Suffix | None:
        left = self.table.without(after.left, mesh)
        parts = self._parts(after, mesh)
        if left is None or parts is None:
            return None
        if not self.table.fits(mesh, cost, self.in_flight[after.count]):
            return None
        transfer = float(self._transfers(after)[mesh])
        return _Suffix(
            first=start,
            left=left,
            count=after.count + 1,
            total=after.total + transfer + cost.seconds,
            slowest=self._slowest(after, transfer, cost.seconds, max),
            once=max(after.once, cost.once_seconds),
            parts=parts,
            mesh=mesh,
            stage=PlacedStage(start, after.first, self.problem.submeshes[mesh], cost),
            after=after,
        )

    def _slowest(
        self, after: _Suffix, transfer: Any, seconds: Any, maximum: Callable[[Any, Any], Any]
    ) -> Any:
        """Return the first maximum of the objective with one more stage in front of `after`.

        Args:
            after: the stages behind the new one.
            transfer: seconds of the transfer between them, a number or an array of alternatives.
            seconds: seconds of the new stage, likewise.
            maximum: returns the larger one of two numbers, or of each pair in two arrays.
        """
        repeats = self.table.repeats
        if self.problem.few_bubbles:  # the sum counts later stages too
            return maximum(after.slowest, repeats * seconds - transfer - after.total)
        in_flight = self.in_flight[after.count]
        slowest = maximum(after.slowest, repeats * maximum(transfer / 2, seconds))
        returns = self.problem.num_returns(in_flight)
        slowest = maximum(slowest, returns * (after.total + transfer + seconds))
        if after.count:
            turns = self.problem.num_turns(in_flight, self.in_flight[after.count - 1])
            slowest = maximum(slowest, turns * (after.front + transfer + seconds))
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


def _coarse(in_flight: int) -> int:
    """Return a number without all but its three leading bits."""
    return in_flight - in_flight % (1 << max(0, in_flight.bit_length() - 3))


@dataclass(frozen=True, slots=True)
class _Stale:
    """The outcome of a search whose bounds are worth renewing."""
