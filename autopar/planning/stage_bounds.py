"""Bounds for stage construction: what stages cost at least, and what the layers before a suffix cost at least."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Self

import numpy as np

from autopar.planning.stage_problem import StageCost, StageProblem

_THRESHOLDS = 32


class CostTable:
    """The best known costs of every stage on every submesh: lower bounds, replaced by exact costs as these are asked for.

    Attributes:
        devices: number of devices of each pool, in units of what the submeshes that can hold a stage have in common.
        sizes: devices of each submesh, in the same units; units: devices of a unit of each pool.
        usable: submeshes that can hold a stage.
        repeats: microbatches after the first.
        num_costs: how many exact costs were asked for.
        num_surprises: how many of them were larger than their bound.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.repeats = problem.num_micro_batches - 1
        self.num_costs = self.num_surprises = 0
        self._kind, self._places = _stage_kinds(problem)
        self._exact: set[tuple[int, int]] = set()
        self._known: dict[tuple[int, int], tuple[StageCost, ...]] = {}
        self._levels: dict[int, np.ndarray] = {}
        for mesh, submesh in enumerate(problem.submeshes):
            for kind, (starts, stops) in enumerate(self._places):
                if problem.lower_bound is None:
                    self.exact(mesh, starts[0], stops[0])
                else:
                    self._known[mesh, kind] = tuple(
                        problem.lower_bound(starts[0], stops[0], submesh)
                    )
        self.num_surprises = 0
        self.usable = [
            i for i, found in enumerate(np.isfinite(self.level(1)[0]).any(axis=(1, 2))) if found
        ]
        self.units = units = [self._unit(pool) for pool in range(len(problem.pools))]
        self.devices = tuple(
            pool.num_devices // unit for pool, unit in zip(problem.pools, units, strict=True)
        )
        self.sizes = [submesh.num_devices // units[submesh.pool] for submesh in problem.submeshes]
        self.can_use_all = all(
            pool.num_devices % unit == 0 for pool, unit in zip(problem.pools, units, strict=True)
        )
        self.cuts = self._cheapest_transfers()

    def exact(self, mesh: int, start: int, stop: int) -> tuple[StageCost, ...]:
        """The exact costs, asked for at most once for each kind of stage."""
        kind = int(self._kind[start, stop])
        if (mesh, kind) not in self._exact:
            bounds = self._known.get((mesh, kind), ())
            costs = tuple(self.problem.costs(start, stop, self.problem.submeshes[mesh]))
            self.num_costs += 1
            self.num_surprises += any(
                self._terms(mesh, costs, k) != self._terms(mesh, bounds, k) for k in self._levels
            )
            self._exact.add((mesh, kind))
            self._known[mesh, kind] = costs
            for in_flight, level in self._levels.items():
                level[:, mesh, *self._places[kind]] = np.reshape(
                    self._terms(mesh, costs, in_flight), (2, 1)
                )
        return self._known[mesh, kind]

    def level(self, in_flight: int) -> np.ndarray:
        """Seconds and the slowest term of every stage that fits with so many microbatches, [2, submesh, start, stop]."""
        if in_flight not in self._levels:
            size = self.problem.num_layers + 1
            self._levels[in_flight] = level = np.full(
                (2, len(self.problem.submeshes), size, size), np.inf
            )
            for (mesh, kind), costs in self._known.items():
                level[:, mesh, *self._places[kind]] = np.reshape(
                    self._terms(mesh, costs, in_flight), (2, 1)
                )
        return self._levels[in_flight]

    def fits(self, mesh: int, cost: StageCost, in_flight: int) -> bool:
        budget = self.problem.pools[self.problem.submeshes[mesh].pool].memory_bytes
        return cost.fixed_bytes + in_flight * cost.micro_batch_bytes <= budget

    def busy(self, cost: StageCost) -> float:
        """Seconds after the first microbatch: the slowest term of the objective."""
        return self.repeats * cost.seconds + cost.once_seconds

    def without(self, left: tuple[int, ...], mesh: int) -> tuple[int, ...] | None:
        """The devices that are left when a stage gets `mesh`; None if there are not enough."""
        pool, size = self.problem.submeshes[mesh].pool, self.sizes[mesh]
        return None if left[pool] < size else (*left[:pool], left[pool] - size, *left[pool + 1 :])

    def _terms(self, mesh: int, costs: Sequence[StageCost], in_flight: int) -> tuple[float, float]:
        costs = [cost for cost in costs if self.fits(mesh, cost, in_flight)]
        return min((c.seconds for c in costs), default=np.inf), min(
            (self.busy(c) for c in costs), default=np.inf
        )

    def _unit(self, pool: int) -> int:
        """The greatest common divisor of the usable submeshes of a pool."""
        sizes = [
            self.problem.submeshes[mesh].num_devices
            for mesh in self.usable
            if self.problem.submeshes[mesh].pool == pool
        ]
        return gcd(*sizes) or 1

    def _cheapest_transfers(self) -> np.ndarray:
        """By layer before which the cut is, the least seconds of a transfer between two submeshes."""
        transfer, meshes = (
            self.problem.transfer,
            [self.problem.submeshes[mesh] for mesh in self.usable],
        )
        cuts = np.zeros(self.problem.num_layers + 1)
        if transfer:
            for cut in range(1, self.problem.num_layers):
                cuts[cut] = min(
                    (transfer(cut, a, b, None) for a in meshes for b in meshes), default=0.0
                )
        return cuts


def _stage_kinds(problem: StageProblem) -> tuple[np.ndarray, list[tuple[list[int], list[int]]]]:
    """A number for every (start, stop), the same for interchangeable stages, and for each number its starts and stops."""
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
    """What the layers before a suffix cost at least, by the devices left for them.

    For each of several thresholds the least sum over stages whose slowest term stays below it. Between two thresholds the slowest
    term is at least the lower one, which together with the sum bounds the objective; thresholds are close together where the
    optimum can be. All stages are taken to hold as many microbatches as the last one of these layers does.
    """

    lower: np.ndarray  # [threshold]: the next smaller threshold
    sums: np.ndarray  # [first layer of the suffix, devices left of each pool..., threshold]

    @classmethod
    def of(cls, table: CostTable, in_flight: int) -> Self:
        """Bounds from what `table` knows, for stages with at least `in_flight` microbatches."""
        slowest = table.level(in_flight)[1]
        slowest = slowest[np.isfinite(slowest)]
        low, high = (slowest.min(), slowest.max()) if slowest.size else (0.0, 0.0)
        thresholds = np.geomspace(max(low, high * 1e-6, 1e-30), max(high, 1e-30), _THRESHOLDS // 4)
        for _ in range(2):
            sums = _least_sums(table, in_flight, thresholds)[(-1, *table.devices)]
            if np.isfinite(sums[:-1]).any():
                near = np.flatnonzero(
                    sums[:-1] + np.append(low, thresholds[:-1])
                    <= 1.05 * np.min(sums[:-1] + thresholds)
                )
                first, last = thresholds[max(near[0] - 1, 0)], thresholds[near[-1]]
                thresholds = np.linspace(min(first, last), last, _THRESHOLDS // 4)
        thresholds = np.linspace(thresholds[0], thresholds[-1], _THRESHOLDS)
        return cls(np.append(0.0, thresholds), _least_sums(table, in_flight, thresholds))

    def bounds(
        self, starts: np.ndarray, left: tuple[int, ...], total: np.ndarray, slowest: np.ndarray
    ) -> np.ndarray:
        """Least objective of any plan with a suffix that starts at one of these layers and has these terms."""
        return total + (self.sums[(starts, *left)] + np.maximum(slowest[:, None], self.lower)).min(
            axis=1
        )

    def bound(self, first: int, left: tuple[int, ...], total: float, slowest: float) -> float:
        """The same for one suffix."""
        return total + float((self.sums[(first, *left)] + np.maximum(slowest, self.lower)).min())


def _least_sums(table: CostTable, in_flight: int, thresholds: np.ndarray) -> np.ndarray:
    """`Remainder.sums` for these thresholds and, last, without any."""
    layers, count = table.problem.num_layers, len(thresholds)
    grid = tuple(devices + 1 for devices in table.devices)
    sums = np.full((layers + 1, *grid, count + 1), np.inf)
    sums[0] = 0.0
    if not table.problem.leave_idle:
        sums[0].reshape(-1, count + 1)[1:] = np.inf  # every device must have been used
    seconds, slowest = table.level(in_flight)
    for stop in range(1, layers + 1):
        for mesh in table.usable:
            pool, size = table.problem.submeshes[mesh].pool, table.sizes[mesh]
            if size >= grid[pool]:
                continue
            before, after = [slice(None)] * len(grid), [slice(None)] * len(grid)
            before[pool], after[pool] = slice(0, grid[pool] - size), slice(size, None)
            # few stages are below a threshold, so that those are worth a turn of their own
            for limits, part in (
                (thresholds, slice(count)),
                (np.array([np.inf]), slice(count, None)),
            ):
                starts = np.flatnonzero(
                    (slowest[mesh, :stop, stop] <= limits[-1])
                    & np.isfinite(slowest[mesh, :stop, stop])
                )
                if starts.size:
                    cost = seconds[mesh, starts, stop, None] + table.cuts[stop]
                    cost = np.where(slowest[mesh, starts, stop, None] <= limits, cost, np.inf)
                    cost = cost.reshape(len(starts), *(1,) * len(grid), len(limits))
                    target = sums[(stop, *after, part)]
                    np.minimum(
                        target, (sums[(starts, *before, part)] + cost).min(axis=0), out=target
                    )
    return sums
