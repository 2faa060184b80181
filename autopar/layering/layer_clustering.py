"""Layer clustering: cuts a list of equations into layers of similar work with little data between them.

An exact dynamic program for equation 6 of Alpa (Zheng et al., OSDI'22): the layer that receives the most bytes receives as few as
possible, while no layer does more than its share of the work by more than a tolerance. Of the best ways to cut it takes the one
that spreads work most evenly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MOST_HEAVY = 3
"""A layer has at least this many heavy equations (matrix products, convolutions), or its share of them if there are fewer."""

type Received = Callable[[], Iterable[np.ndarray]]
"""Yields for stop = 1, 2, ... n an array over start = 0 ... stop - 1: bytes that equations start ... stop - 1 take from earlier
ones. It may be the same array every time, changed."""


class NoLayersError(ValueError):
    """The equations can't be cut into so many layers of similar work."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Consecutive layers.

    Attributes:
        stops: for each layer the equation after its last one.
        bottleneck: the most bytes that a layer receives.
    """

    stops: tuple[int, ...]
    bottleneck: float


def cluster_layers(
    flops: np.ndarray,
    received: Received,
    num_layers: int,
    eps: float = 0.6,
    heavy: np.ndarray | None = None,
) -> Layers:
    """Cut equations into `num_layers` layers.

    Args:
        flops: FLOP of each equation, [equations].
        received: bytes between them (`received_bytes`).
        eps: a layer does at most 1 + eps times the work of an average one. A layer with the least number of heavy equations may
            do more, as it can't be made smaller.
        heavy: which equations count as heavy, [equations]; None: those that do work.

    Raises:
        NoLayersError: there are too few heavy equations, or work is too uneven for `eps`.
    """
    heavy = flops > 0 if heavy is None else heavy.astype(bool)
    if not 1 <= num_layers <= heavy.sum():
        raise NoLayersError(
            f"{num_layers} layers asked of {heavy.sum()} heavy equations; use 1 to {heavy.sum()} layers"
        )
    windows = _Windows.of(np.asarray(flops, float), heavy, num_layers, eps)

    def most_received(
        before: np.ndarray, column: np.ndarray, starts: np.ndarray, stop: int
    ) -> np.ndarray:
        return np.maximum(before, column)

    least = _least_received(windows, received())
    bottleneck = np.inf
    for share in (0.05, 0.3, 1.0):  # a good cut needs only starts where little is received
        limit = min(bottleneck, np.quantile(least, share, method="lower"))
        bottleneck = min(bottleneck, _least(windows, least <= limit, received(), most_received)[0])
        if bottleneck <= limit:
            break
    if not np.isfinite(bottleneck):
        raise NoLayersError(
            f"no {num_layers} layers with at least {windows.least_heavy} heavy equations each do at most {1 + eps:g} times the "
            "average work; use a larger eps or another number of layers"
        )
    work = np.append(0.0, np.cumsum(flops)) / max(np.sum(flops), 1.0)

    def unevenness(
        before: np.ndarray, column: np.ndarray, starts: np.ndarray, stop: int
    ) -> np.ndarray:
        return before + np.where(column <= bottleneck, (work[stop] - work[starts]) ** 2, np.inf)

    _, stops = _least(windows, least <= bottleneck, received(), unevenness)
    return Layers(stops, bottleneck)


def received_bytes(
    num_equations: int, values: Sequence[tuple[int, float, Sequence[int]]]
) -> Received:
    """What layers receive, from values as (equation that makes it, bytes, equations that use it in order).

    A layer receives a value once, however often it uses it. Parameters and other inputs of the step are no such values.
    """
    used_by: list[list[int]] = [[] for _ in range(num_equations)]
    for value, (_, _, users) in enumerate(values):
        for user in users:
            used_by[user].append(value)

    def columns() -> Iterator[np.ndarray]:
        column = np.zeros(num_equations)
        touched = [maker for maker, _, _ in values]
        for equation in range(num_equations):
            for value in used_by[
                equation
            ]:  # new to every layer that starts after the value was made or used last
                column[touched[value] + 1 : equation + 1] += values[value][1]
                touched[value] = equation
            yield column[: equation + 1]

    return columns


@dataclass(frozen=True, slots=True)
class _Windows:
    """Which layers are allowed: for each stop the starts `first[stop]` ... `after[stop]` - 1.

    Attributes:
        fewest, most: bounds of the number of layers before each stop if there are to be `num_layers` in all.
    """

    num_layers: int
    least_heavy: int
    first: np.ndarray
    after: np.ndarray
    fewest: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, flops: np.ndarray, heavy: np.ndarray, num_layers: int, eps: float) -> "_Windows":
        heavies = np.append(0, np.cumsum(heavy))
        work = np.append(0.0, np.cumsum(np.where(heavy, flops, 0.0)))
        least = min(MOST_HEAVY, int(heavies[-1]) // num_layers)
        most_work = (1 + eps) * work[-1] / num_layers * (1 + 1e-9)
        first = np.minimum(
            np.searchsorted(work, work - most_work), np.searchsorted(heavies, heavies - least)
        )
        after = np.searchsorted(heavies, heavies - least, side="right")
        size = len(work)
        # the furthest stop of a layer that starts here
        last = np.searchsorted(first, np.arange(size), side="right") - 1
        before, behind = np.zeros(size, int), np.zeros(size, int)
        for stop in range(1, size):
            before[stop] = before[first[stop]] + 1
        for start in range(size - 2, -1, -1):
            behind[start] = behind[last[start]] + 1
        fewest = np.maximum(before, num_layers - (heavies[-1] - heavies) // least)
        most = np.minimum(heavies // least, num_layers - behind)
        return cls(num_layers, least, first, after, fewest, most)


def _least_received(windows: _Windows, columns: Iterable[np.ndarray]) -> np.ndarray:
    """For each start the least bytes that a layer from there receives; 0 is always a start."""
    least = np.full(len(windows.first) - 1, np.inf)
    for stop, column in enumerate(columns, start=1):
        starts = slice(windows.first[stop], windows.after[stop])
        np.minimum(least[starts], column[starts], out=least[starts])
    least[0] = -np.inf
    return least


type _Step = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""(objective before [layers, start], bytes received [start], starts, stop) -> objective [layers, start]."""


def _least(
    windows: _Windows, useful: np.ndarray, columns: Iterable[np.ndarray], step: _Step
) -> tuple[float, tuple[int, ...]]:
    """The least objective of any cut before `useful` equations only, and the stops of its layers."""
    size = len(windows.first)
    cuts = np.flatnonzero(useful)
    first, after = np.searchsorted(cuts, windows.first), np.searchsorted(cuts, windows.after)
    best = np.full((windows.num_layers + 1, len(cuts) + 1), np.inf)
    choice = np.zeros((windows.num_layers + 1, len(cuts) + 1), int)
    best[0, 0] = 0.0
    position = {int(stop): i for i, stop in enumerate([*cuts, size - 1])}
    for stop, column in enumerate(columns, start=1):
        if stop in position:
            low, high = max(1, windows.fewest[stop]), windows.most[stop] + 1
            begin, end = first[stop], after[stop]
            if low < high and begin < end:
                starts = cuts[begin:end]
                costs = step(best[low - 1 : high - 1, begin:end], column[starts], starts, stop)
                at = costs.argmin(axis=1)
                best[low:high, position[stop]] = costs[np.arange(high - low), at]
                choice[low:high, position[stop]] = at + begin
    stops, stop, at = [], size - 1, len(cuts)
    for layer in range(windows.num_layers, 0, -1):
        stops.append(int(stop))
        at = choice[layer, at]
        stop = cuts[at]
    return float(best[-1, -1]), tuple(reversed(stops))
