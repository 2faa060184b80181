"""Bounds for stage construction: lower bounds of stages, and of the layers before a suffix."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Self

import numpy as np

from autopar.planning.stage_problem import StageCost, StageProblem

_THRESHOLDS = 32
"""Number of thresholds of a `Remainder`."""

_NO_THRESHOLD = np.array([np.inf])


class CostTable:
    """The best known cost of every stage on every submesh.

    Costs start as lower bounds; exact costs replace them when they are requested.

    Attributes:
        problem: the problem that the costs belong to.
        repeats: microbatches after the first.
        num_costs: number of exact costs that were requested.
        num_surprises: number of those that differ from their bound.
        usable: numbers of the submeshes that can hold a stage.
        units: devices of a unit of each pool, the greatest common divisor of its usable submeshes.
        devices: devices of each pool, in units.
        sizes: devices of each submesh, in units.
        can_use_all: whether every pool is a whole number of units.
        transfer_seconds: seconds of the fastest transfer into the stage that starts with each
            layer.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.repeats = problem.num_micro_batches - 1
        self.num_costs = 0
        self.num_surprises = 0
        self._kind, self._places = _stage_kinds(problem)
        self._exact: set[tuple[int, int]] = set()
        self._costs: dict[tuple[int, int], tuple[StageCost, ...]] = {}
        self._levels: dict[int, np.ndarray] = {}
        for mesh, submesh in enumerate(problem.submeshes):
            for kind, (starts, stops) in enumerate(self._places):
                if problem.lower_bound is None:
                    self.exact(mesh, starts[0], stops[0])
                else:
                    self._costs[mesh, kind] = tuple(
                        problem.lower_bound(starts[0], stops[0], submesh)
                    )
        self.num_surprises = 0
        self.usable = [
            int(i) for i in np.flatnonzero(np.isfinite(self.level(1)[0]).any(axis=(1, 2)))
        ]
        self.units = units = [self._unit(pool) for pool in range(len(problem.pools))]
        self.devices = tuple(
            pool.num_devices // unit for pool, unit in zip(problem.pools, units, strict=True)
        )
        self.sizes = [submesh.num_devices // units[submesh.pool] for submesh in problem.submeshes]
        self.can_use_all = all(
            pool.num_devices % unit == 0 for pool, unit in zip(problem.pools, units, strict=True)
        )
        self.transfer_seconds = self._fastest_transfers()

    def exact(self, mesh: int, start: int, stop: int) -> tuple[StageCost, ...]:
        """Return the exact costs of layers `start` to `stop` - 1 on submesh number `mesh`.

        They are computed at most once for all stages of the same kind.
        """
        kind = int(self._kind[start, stop])
        if (mesh, kind) not in self._exact:
            bounds = self._costs.get((mesh, kind), ())
            costs = tuple(self.problem.costs(start, stop, self.problem.submeshes[mesh]))
            self.num_costs += 1
            self.num_surprises += any(
                self._terms(mesh, costs, k) != self._terms(mesh, bounds, k) for k in self._levels
            )
            self._exact.add((mesh, kind))
            self._costs[mesh, kind] = costs
            for in_flight, level in self._levels.items():
                level[:, mesh, *self._places[kind]] = np.reshape(
                    self._terms(mesh, costs, in_flight), (2, 1)
                )
        return self._costs[mesh, kind]

    def level(self, in_flight: int) -> np.ndarray:
        """Return the terms of every stage that fits with `in_flight` microbatches in flight.

        Returns:
            Seconds of a microbatch and the stage's busy seconds, shape [2, submesh, start, stop];
            infinite where no stage fits.
        """
        if in_flight not in self._levels:
            size = self.problem.num_layers + 1
            self._levels[in_flight] = level = np.full(
                (2, len(self.problem.submeshes), size, size), np.inf
            )
            for (mesh, kind), costs in self._costs.items():
                level[:, mesh, *self._places[kind]] = np.reshape(
                    self._terms(mesh, costs, in_flight), (2, 1)
                )
        return self._levels[in_flight]

    def fits(self, mesh: int, cost: StageCost, in_flight: int) -> bool:
        """Return whether a stage fits into the memory of submesh number `mesh`."""
        budget = self.problem.pools[self.problem.submeshes[mesh].pool].memory_bytes
        return cost.fixed_bytes + in_flight * cost.micro_batch_bytes <= budget

    def busy(self, cost: StageCost) -> float:
        """Return the seconds that a stage is busy after the first microbatch.

        They are a lower bound of the sum of the objective's two maxima.
        """
        return self.repeats * cost.seconds + cost.once_seconds

    def without(self, left: tuple[int, ...], mesh: int) -> tuple[int, ...] | None:
        """Return the devices left when a stage gets submesh number `mesh`.

        None if there are too few.
        """
        pool, size = self.problem.submeshes[mesh].pool, self.sizes[mesh]
        return None if left[pool] < size else (*left[:pool], left[pool] - size, *left[pool + 1 :])

    def _terms(self, mesh: int, costs: Sequence[StageCost], in_flight: int) -> tuple[float, float]:
        costs = [cost for cost in costs if self.fits(mesh, cost, in_flight)]
        seconds = min((cost.seconds for cost in costs), default=np.inf)
        busy = min((self.busy(cost) for cost in costs), default=np.inf)
        return seconds, busy

    def _unit(self, pool: int) -> int:
        """Return the greatest common divisor of the usable submeshes of a pool."""
        sizes = [
            self.problem.submeshes[mesh].num_devices
            for mesh in self.usable
            if self.problem.submeshes[mesh].pool == pool
        ]
        return gcd(*sizes) or 1

    def _fastest_transfers(self) -> np.ndarray:
        """Return the seconds of the fastest transfer into the stage that starts with each layer."""
        seconds = np.zeros(self.problem.num_layers + 1)
        transfer = self.problem.transfer
        if transfer is None:
            return seconds
        submeshes = [self.problem.submeshes[mesh] for mesh in self.usable]
        for layer in range(1, self.problem.num_layers):
            pairs = product(submeshes, repeat=2)
            seconds[layer] = min((transfer(layer, a, b, None) for a, b in pairs), default=0.0)
        return seconds


def _stage_kinds(problem: StageProblem) -> tuple[np.ndarray, list[tuple[list[int], list[int]]]]:
    """Number the kinds of stages; stages of one kind are interchangeable.

    Returns:
        The kind of every stage, shape [start, stop], and the starts and stops of each kind.
    """
    layers = problem.num_layers
    kinds = problem.layer_kinds if problem.layer_kinds is not None else range(layers)
    numbers: defaultdict[tuple, int] = defaultdict(lambda: len(numbers))
    table = np.full((layers + 1, layers + 1), -1)
    places: list[tuple[list[int], list[int]]] = []
    for start in range(layers):
        number = -1
        for stop in range(start + 1, layers + 1):
            table[start, stop] = number = numbers[number, kinds[stop - 1]]
            if number == len(places):
                places.append(([], []))
            places[number][0].append(start)
            places[number][1].append(stop)
    return table, places


@dataclass(frozen=True, slots=True)
class Remainder:
    """The least cost of the layers before a suffix, by the devices left for them.

    For each of several thresholds it stores the least sum over stages that are busy for no longer
    than the threshold. Between two thresholds the maxima of the objective are at least the lower
    one, which together with the sum bounds the objective. The thresholds are dense where the
    optimum can be. All stages are assumed to hold as many microbatches as the last of these layers
    does.

    Attributes:
        lower: the next smaller threshold, shape [threshold].
        sums: least sums, shape [first layer of the suffix, devices left of each pool...,
            threshold].
        few_bubbles: see `StageProblem`. Stages beyond a threshold then take that long alone.
    """

    lower: np.ndarray
    sums: np.ndarray
    few_bubbles: bool

    @classmethod
    def of(cls, table: CostTable, in_flight: int) -> Self:
        """Return bounds from the costs in `table`.

        The stages are assumed to hold at least `in_flight` microbatches.
        """
        slowest = table.level(in_flight)[1]
        slowest = slowest[np.isfinite(slowest)]
        low, high = (slowest.min(), slowest.max()) if slowest.size else (0.0, 0.0)
        thresholds = np.geomspace(max(low, high * 1e-6, 1e-30), max(high, 1e-30), _THRESHOLDS // 4)
        for _ in range(2):
            sums = _least_sums(table, in_flight, thresholds)[(-1, *table.devices)]
            if np.isfinite(sums).any():
                near = np.flatnonzero(
                    sums + np.append(low, thresholds[:-1]) <= 1.05 * np.min(sums + thresholds)
                )
                first, last = thresholds[max(near[0] - 1, 0)], thresholds[near[-1]]
                thresholds = np.linspace(min(first, last), last, _THRESHOLDS // 4)
        thresholds = np.linspace(thresholds[0], thresholds[-1], _THRESHOLDS)
        # The sums without a threshold need all stages, and few stages are below the largest one.
        sums = [_least_sums(table, in_flight, each) for each in (thresholds, _NO_THRESHOLD)]
        lower = np.append(0.0, thresholds)
        return cls(lower, np.concatenate(sums, axis=-1), table.problem.few_bubbles)

    def in_stages(self, table: CostTable, in_flight: int, most: int) -> list[Self]:
        """Return the bounds if the layers before the suffix form at most 0, 1, ... `most` stages.

        Args:
            table: the costs.
            in_flight: see `of`.
            most: number of stages.
        """
        parts = self.lower[1:], _NO_THRESHOLD
        sums = [_no_stages(table, len(part)) for part in parts]
        limited: list[Self] = []
        for _ in range(most + 1):
            limited.append(replace(self, sums=np.concatenate(sums, axis=-1)))
            sums = [
                _with_stage(table, in_flight, part, before, before.copy())
                for part, before in zip(parts, sums, strict=True)
            ]
        return limited

    def bounds(
        self,
        starts: np.ndarray,
        left: Sequence[np.ndarray],
        total: np.ndarray,
        slowest: np.ndarray,
    ) -> np.ndarray:
        """Return a lower bound of the objective of every plan with one of several suffixes.

        Args:
            starts: first layer of each suffix.
            left: for each pool, the devices that each suffix leaves, in units.
            total: sum of each suffix.
            slowest: maxima of the objective of each suffix.
        """
        sums = self.sums[(starts, *left)]
        if self.few_bubbles:
            return np.maximum((total + slowest)[:, None] + sums, self.lower).min(axis=1)
        return total + (np.maximum(slowest[:, None], self.lower) + sums).min(axis=1)

    def bound(self, first: int, left: tuple[int, ...], total: float, slowest: float) -> float:
        """Return the bound for one suffix; see `bounds`."""
        arrays = [np.array([number]) for number in left]
        (bound,) = self.bounds(np.array([first]), arrays, np.array([total]), np.array([slowest]))
        return float(bound)


def _least_sums(table: CostTable, in_flight: int, thresholds: np.ndarray) -> np.ndarray:
    """Return `Remainder.sums` for these thresholds, which ascend."""
    sums = _no_stages(table, len(thresholds))
    return _with_stage(table, in_flight, thresholds, sums, sums)


def _no_stages(table: CostTable, num_thresholds: int) -> np.ndarray:
    """Return `Remainder.sums` without stages, for which no layers may be left."""
    grid = (devices + 1 for devices in table.devices)
    sums = np.full((table.problem.num_layers + 1, *grid, num_thresholds), np.inf)
    sums[0] = 0.0
    if not table.problem.leave_idle:
        sums[0].reshape(-1, num_thresholds)[1:] = np.inf  # every device must have been used
    return sums


def _with_stage(
    table: CostTable,
    in_flight: int,
    thresholds: np.ndarray,
    before: np.ndarray,
    sums: np.ndarray,
) -> np.ndarray:
    """Lower sums by those with one more stage, and return them.

    Args:
        table: the costs.
        in_flight: least number of microbatches that the stage holds.
        thresholds: largest seconds for which a stage is busy; they ascend.
        before: sums without this stage. If they are `sums` themselves, there may be any number of
            stages.
        sums: the sums to lower.
    """
    grid, count = before.shape[1:-1], len(thresholds)
    seconds, slowest = table.level(in_flight)
    for start in range(table.problem.num_layers):
        box = _finite_box(before[start])
        for mesh in table.usable:
            costs = seconds[mesh, start] + table.transfer_seconds
            least = np.searchsorted(thresholds, slowest[mesh, start])
            stops = np.flatnonzero(np.isfinite(costs) & (least < count))
            if not stops.size:
                continue
            pool, size = table.problem.submeshes[mesh].pool, table.sizes[mesh]
            used, left = list(box), list(box)
            end = min(box[pool].stop, grid[pool] - size)
            used[pool] = slice(box[pool].start, end)
            left[pool] = slice(box[pool].start + size, end + size)
            stages = slice(stops[0], stops[-1] + 1)
            cost = np.where(np.arange(count) < least[stages, None], np.inf, costs[stages, None])
            cost = cost.reshape(-1, *(1,) * len(grid), count)
            target = sums[(stages, *left)]
            np.minimum(target, before[(start, *used)] + cost, out=target)
    return sums


def _finite_box(sums: np.ndarray) -> tuple[slice, ...]:
    """Return the range of devices left of each pool with finite sums, of all thresholds.

    Only few numbers of devices suffice for some layers and are not too many.
    """
    finite = np.nonzero(np.isfinite(sums[..., -1]))
    return tuple(slice(at.min(initial=len(sums)), at.max(initial=-1) + 1) for at in finite)
