"""Effect of a task without contention on the streams of its mesh: a 3 x 3 max-plus map.

If the compute stream and the links within and between hosts are free at times[0], times[1] and
times[2] before such a task, stream i is free at

    max(map[i][0] + times[0], map[i][1] + times[1], map[i][2] + times[2])

after it: work is a sum; queueing and waiting are maxima (the max-plus algebra of Baccelli, Cohen,
Olsder and Quadrat, Synchronization and Linearity, 1992). A linear map is determined by what it
does to the unit vectors, so a task is played once from each of them by `stream_rules`. The result
is nine numbers, even for ten thousand kernels. Tasks in sequence are a product of maps, and a loop
is a power of its body.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from simulator.engine.priced_ops import PricedOps
from simulator.engine.stream_rules import MeshStreams, Transfer
from simulator.spans import Link

type Row = tuple[float, float, float]
"""Times of the compute stream, the links within hosts and those between hosts; or a row of a map:
seconds to add to each of them before taking the maximum, -inf where a stream has no effect."""


@dataclass(frozen=True, slots=True)
class MaxPlusMap:
    """When the three streams of a mesh are free after a task, from when they were before it."""

    compute: Row = (0.0, -inf, -inf)
    within: Row = (-inf, 0.0, -inf)
    between: Row = (-inf, -inf, 0.0)

    @classmethod
    def task(cls, seconds: float) -> "MaxPlusMap":
        """Return the effect of a task that only computes."""
        return cls(compute=(seconds, -inf, -inf))

    @classmethod
    def transfer(cls, seconds: float, link: Link = "between hosts") -> "MaxPlusMap":
        """Return the effect of a transfer, which the compute stream doesn't wait for."""
        if link == "within hosts":
            return cls(within=(seconds, seconds, -inf))
        return cls(between=(seconds, -inf, seconds))

    def after(self, times: Row) -> Row:
        """Return when the streams are free after the task, if they were at `times` before it."""
        return (
            _product(self.compute, times),
            _product(self.within, times),
            _product(self.between, times),
        )

    def then(self, later: "MaxPlusMap") -> "MaxPlusMap":
        """Return the effect of this task and a later one."""
        columns = zip(self.compute, self.within, self.between, strict=True)
        return _of_columns(*map(later.after, columns))

    def times(self, count: int) -> "MaxPlusMap":
        """Return the effect of this task `count` times, by repeated squaring."""
        result = MaxPlusMap()
        power = self
        while count:
            if count % 2:
                result = result.then(power)
            power = power.then(power)
            count //= 2
        return result


def max_plus_map(ops: PricedOps) -> MaxPlusMap:
    """Return the effect of a task that doesn't contend.

    Raises:
        ValueError: the task waits for a collective that another task or another iteration started.
    """
    identity = MaxPlusMap()
    units = identity.compute, identity.within, identity.between
    basis = [_UncontendedStreams(unit) for unit in units]
    for streams in basis:
        streams.play(ops)
    return _of_columns(*(streams.times for streams in basis))


@lru_cache(maxsize=1 << 12)
def _loop_map(iterations: int, ops: PricedOps) -> MaxPlusMap:
    return max_plus_map(ops).times(iterations)


def _product(row: Row, times: Row) -> float:
    return max(row[0] + times[0], row[1] + times[1], row[2] + times[2])


def _of_columns(compute: Row, within: Row, between: Row) -> MaxPlusMap:
    return MaxPlusMap(*zip(compute, within, between, strict=True))


class _UncontendedStreams(MeshStreams[float]):
    """Streams on which no transfer contends, so that the end of each is known when it is issued."""

    def __init__(self, times: Row) -> None:
        super().__init__(float)
        self.times = times

    @property
    def times(self) -> Row:
        return self.compute, self.free["within hosts"], self.free["between hosts"]

    @times.setter
    def times(self, times: Row) -> None:
        self.compute, self.free["within hosts"], self.free["between hosts"] = times

    def issue(self, transfer: Transfer[float]) -> None:
        transfer.contention_factor = 1.0
        super().issue(transfer)

    def repeat(self, iterations: int, ops: PricedOps) -> None:
        self.times = _loop_map(iterations, ops).after(self.times)
