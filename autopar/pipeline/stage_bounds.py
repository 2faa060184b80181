"""Bounds for stage construction: what stages cost at least, and what the layers before a suffix cost at least."""

from dataclasses import dataclass
from math import gcd
from typing import Self

import numpy as np

from autopar.pipeline.stages import StageCost, StageProblem

_THRESHOLDS = 32


class CostTable:
    """The best known costs of every stage on every submesh: lower bounds, replaced by exact costs as these are asked for.

    Attributes:
        devices: number of devices of each pool, in units of what the submeshes that can hold a stage have in common.
        repeats: microbatches after the first.
        num_costs: how many exact costs were asked for.
        num_surprises: how many of them were larger than their bound.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.repeats = problem.num_micro_batches - 1
        self.num_costs = self.num_surprises = 0
        layers, meshes = problem.num_layers, len(problem.submeshes)
        self._kind = _stage_kinds(problem)
        self._exact: dict[tuple[int, int], tuple[StageCost, ...]] = {}
        self._places: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        starts, stops = np.nonzero(self._kind >= 0)
        by_kind = np.argsort(self._kind[starts, stops], kind="stable")
        splits = np.flatnonzero(np.diff(self._kind[starts, stops][by_kind])) + 1
        for group in np.split(by_kind, splits):
            self._places[int(self._kind[starts[group[0]], stops[group[0]]])] = starts[group], stops[group]
        shape = (meshes, layers + 1, layers + 1)
        self._seconds, self._slowest = np.full(shape, np.inf), np.full(shape, np.inf)
        self._fixed, self._per_batch = np.zeros(shape), np.zeros(shape)
        for mesh, submesh in enumerate(problem.submeshes):
            for starts, stops in self._places.values():
                start, stop = int(starts[0]), int(stops[0])
                if problem.lower_bound is None:
                    self.exact(mesh, start, stop)
                else:
                    self._store(mesh, start, stop, (problem.lower_bound(start, stop, submesh),))
        self.num_surprises = 0
        self._units = self._common_sizes()
        self.devices = tuple(pool.num_devices // unit for pool, unit in zip(problem.pools, self._units, strict=True))
        self._sizes = [submesh.num_devices // self._units[submesh.pool] for submesh in problem.submeshes]
        self.usable = [mesh for mesh in range(meshes) if np.isfinite(self._seconds[mesh]).any()]
        self.cuts = self._cheapest_transfers()

    def exact(self, mesh: int, start: int, stop: int) -> tuple[StageCost, ...]:
        """The exact costs, one for each logical shape, asked for at most once."""
        key = int(self._kind[start, stop]), mesh
        if key not in self._exact:
            costs = tuple(self.problem.costs(start, stop, self.problem.submeshes[mesh]))
            bound = self._seconds[mesh, start, stop], self._slowest[mesh, start, stop]
            self.num_costs += 1
            self._exact[key] = costs
            self._store(mesh, start, stop, costs)
            known = self._seconds[mesh, start, stop], self._slowest[mesh, start, stop]
            self.num_surprises += known[0] > bound[0] * 1.001 or known[1] > bound[1] * 1.001
        return self._exact[key]

    def column(self, mesh: int, stop: int, in_flight: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By first layer, for stages that end before `stop`: seconds, the slowest term, and whether they fit in memory."""
        budget = self.problem.pools[self.problem.submeshes[mesh].pool].memory_bytes
        fits = self._fixed[mesh, :stop, stop] + in_flight * self._per_batch[mesh, :stop, stop] <= budget
        return self._seconds[mesh, :stop, stop], self._slowest[mesh, :stop, stop], fits

    def without(self, left: tuple[int, ...], mesh: int) -> tuple[int, ...] | None:
        """The devices that are left when a stage gets `mesh`; None if there are not enough."""
        pool, size = self.problem.submeshes[mesh].pool, self._sizes[mesh]
        if mesh not in self.usable or left[pool] < size:
            return None
        return (*left[:pool], left[pool] - size, *left[pool + 1 :])

    def size(self, mesh: int) -> int:
        """Devices of a submesh, in the units of `devices`."""
        return self._sizes[mesh]

    @property
    def covers_all(self) -> bool:
        """Whether the units divide all pools, as they must where no device may be idle."""
        return all(pool.num_devices % unit == 0 for pool, unit in zip(self.problem.pools, self._units, strict=True))

    def slowest_range(self) -> tuple[float, float]:
        """The smallest and the largest slowest term of a stage."""
        finite = self._slowest[np.isfinite(self._slowest)]
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)

    def _store(self, mesh: int, start: int, stop: int, costs: tuple[StageCost, ...]) -> None:
        """Enter the least of `costs` in each respect for all stages of the same kind."""
        at = mesh, *self._places[int(self._kind[start, stop])]
        pool = self.problem.pools[self.problem.submeshes[mesh].pool]
        costs = tuple(c for c in costs if c.fixed_bytes + c.micro_batch_bytes <= pool.memory_bytes)
        self._seconds[at] = min((c.seconds for c in costs), default=np.inf)
        self._slowest[at] = min((self.repeats * c.seconds + c.once_seconds for c in costs), default=np.inf)
        self._fixed[at] = min((c.fixed_bytes for c in costs), default=0.0)
        self._per_batch[at] = min((c.micro_batch_bytes for c in costs), default=0.0)

    def _common_sizes(self) -> list[int]:
        """For each pool the greatest common divisor of its usable submeshes."""
        units = [0] * len(self.problem.pools)
        for mesh, submesh in enumerate(self.problem.submeshes):
            if np.isfinite(self._seconds[mesh]).any():
                units[submesh.pool] = gcd(units[submesh.pool], submesh.num_devices)
        return [unit or pool.num_devices for unit, pool in zip(units, self.problem.pools, strict=True)]

    def _cheapest_transfers(self) -> np.ndarray:
        """By layer before which the cut is, the least seconds of a transfer between two submeshes."""
        transfer, meshes = self.problem.transfer, [self.problem.submeshes[mesh] for mesh in self.usable]
        cuts = np.zeros(self.problem.num_layers + 1)
        if transfer:
            for cut in range(1, self.problem.num_layers):
                cuts[cut] = min((transfer(cut, a, b) for a in meshes for b in meshes), default=0.0)
        return cuts


def _stage_kinds(problem: StageProblem) -> np.ndarray:
    """A number for every (start, stop) that is the same for interchangeable stages; -1 where there is no stage."""
    layers = problem.num_layers
    kinds = problem.layer_kinds if problem.layer_kinds is not None else range(layers)
    numbers: dict[tuple, int] = {}
    table = np.full((layers + 1, layers + 1), -1)
    for start in range(layers):
        number = -1
        for stop in range(start + 1, layers + 1):
            number = numbers.setdefault((number, kinds[stop - 1]), len(numbers))
            table[start, stop] = number
    return table


@dataclass(frozen=True, slots=True)
class Remainder:
    """What the layers before a suffix cost at least, by the devices left for them.

    For each of several thresholds the least sum over stages whose slowest term stays below it. Between two thresholds the slowest
    term is at least the lower one, which together with the sum bounds the objective; thresholds are close together where the
    optimum can be. Memory is counted as if every stage were the last.
    """

    thresholds: np.ndarray  # [threshold], the last one infinite
    sums: np.ndarray  # [first layer of the suffix, devices left of each pool..., threshold]

    @classmethod
    def of(cls, table: CostTable) -> Self | None:
        """Bounds from what `table` knows; None if nothing can fit."""
        if not (table.covers_all or table.problem.leave_idle):
            return None
        low, high = table.slowest_range()
        thresholds = np.geomspace(low, high, _THRESHOLDS) if low > 0 else np.linspace(low, high, _THRESHOLDS)
        for _ in range(2):
            remainder = cls(np.append(thresholds, np.inf), _least_sums(table, np.append(thresholds, np.inf)))
            sums = remainder.sums[(table.problem.num_layers, *table.devices)]
            if not np.isfinite(sums).any():
                return None
            lower = np.append(low, thresholds)
            upper = np.append(thresholds, high)
            near = np.flatnonzero(sums + lower <= 1.1 * np.min(sums + upper))
            thresholds = np.linspace(lower[near[0]], upper[near[-1]], _THRESHOLDS)
        return cls(np.append(thresholds, np.inf), _least_sums(table, np.append(thresholds, np.inf)))

    def bounds(self, stop: int, left: tuple[int, ...], total: np.ndarray, slowest: np.ndarray) -> np.ndarray:
        """Least objective of any plan with a suffix that starts at layer 0, 1, ... `stop` - 1 and has these terms."""
        sums = self.sums[(slice(stop), *left)]
        lower = np.append(0.0, self.thresholds[:-1])
        return total + (sums + np.maximum(slowest[:, None], lower)).min(axis=1)

    def bound(self, first: int, left: tuple[int, ...], total: float, slowest: float) -> float:
        """The same for one suffix."""
        lower = np.append(0.0, self.thresholds[:-1])
        return total + float((self.sums[(first, *left)] + np.maximum(slowest, lower)).min())


def _least_sums(table: CostTable, thresholds: np.ndarray) -> np.ndarray:
    layers = table.problem.num_layers
    grid = tuple(devices + 1 for devices in table.devices)
    sums = np.full((layers + 1, *grid, len(thresholds)), np.inf)
    sums[0] = 0.0
    if not table.problem.leave_idle:
        sums[0].reshape(-1, len(thresholds))[1:] = np.inf  # every device must have been used
    for stop in range(1, layers + 1):
        for mesh in table.usable:
            seconds, slowest, fits = table.column(mesh, stop, 1)
            starts = np.flatnonzero(fits & np.isfinite(seconds))
            if starts.size:
                pool, size = table.problem.submeshes[mesh].pool, table.size(mesh)
                before = [slice(None)] * len(grid)
                before[pool] = slice(0, grid[pool] - size)
                after = [slice(None)] * len(grid)
                after[pool] = slice(size, None)
                cost = np.where(slowest[starts, None] <= thresholds, seconds[starts, None] + table.cuts[stop], np.inf)
                cost = cost.reshape(len(starts), *(1,) * len(grid), len(thresholds))
                target = sums[(stop, *after)]
                np.minimum(target, (sums[(starts, *before)] + cost).min(axis=0), out=target)
    return sums
