"""Layer clustering: divides equations into layers of similar work with little data between them.

An exact dynamic program for equation 6 of Alpa (Zheng et al., OSDI'22). It minimizes the most bytes
that any layer receives, subject to a bound on the work of each layer. Among the optimal clusterings
it takes the one with the most even work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import listed

MIN_HEAVY = 3
"""The least number of heavy equations (matrix products, convolutions) of a layer; fewer only if
there are not that many for every layer."""

EPS = 0.6
"""How much more than the average work a layer does at most, if layers allow it."""

type Received = Callable[[], Iterable[np.ndarray]]
"""A function that yields an array for each stop = 1, 2, ... n.

Entry `start` of the array is the number of bytes that equations start ... stop - 1 read from
earlier ones. All arrays may share memory.
"""


_KINDS = (
    "heavy equations (matrix products, convolutions and loops with these)",
    "equations, which are heavy (matrix products, convolutions) or depend on these",
)


class NoLayersError(ValueError):
    """The equations can't be divided into the given number of layers of similar work."""


def cluster_layers(
    flops: np.ndarray,
    received: Received,
    num_layers: int,
    eps: float | None = None,
    light: np.ndarray | None = None,
    line_of: Callable[[int], str] | None = None,
) -> tuple[int, ...]:
    """Divide equations into `num_layers` layers: return where each ends.

    Args:
        flops: the FLOP of each equation, [equations].
        received: the bytes that layers receive (`received_bytes`).
        num_layers: the number of layers.
        eps: a layer does at most 1 + eps times the average work. A layer with the least number of
            heavy equations may do more, because it can't be smaller. By default `EPS`, or the
            smallest number that leaves layers if work is too uneven for it.
        light: which equations count as heavy, too, if there are more layers than heavy ones.
        line_of: returns the line of the user's code that makes an equation, for the error.

    Returns:
        For each layer the number of the equation after its last one. The most bytes that any layer
        receives are as few as possible.

    Raises:
        NoLayersError: There are too few heavy equations, or work is too uneven for `eps`.
    """
    heavy = flops > 0
    if light is not None and num_layers > heavy.sum():
        heavy = heavy | light
    if not 1 <= num_layers <= heavy.sum():
        advice = "a method without a pipeline"
        if heavy.any():
            layers = "1 layer" if heavy.sum() == 1 else f"1 to {heavy.sum()} layers"
            advice = f"{layers}, and no more stages than layers"
        raise NoLayersError(
            f"{num_layers} layers asked of {heavy.sum()} {_KINDS[light is not None]}; use {advice}"
            f"{_places(heavy, line_of)}"
        )
    flops = np.asarray(flops, float)
    if eps is not None:
        return _cluster(flops, received, num_layers, eps, heavy)
    try:
        return _cluster(flops, received, num_layers, EPS, heavy)
    except NoLayersError:
        eps = _least_eps(flops, received, num_layers, heavy)
        return _cluster(flops, received, num_layers, eps, heavy)


def _places(heavy: np.ndarray, line_of: Callable[[int], str] | None) -> str:
    """Return where heavy equations are, for an error; "" if there are none."""
    if line_of is None or not heavy.any():
        return ""
    lines = dict.fromkeys(line_of(int(number)) for number in np.flatnonzero(heavy))
    return f"; the equations are at {listed(list(lines))}"


def _cluster(
    flops: np.ndarray, received: Received, num_layers: int, eps: float, heavy: np.ndarray
) -> tuple[int, ...]:
    """Return where layers end for a bound on their work; arguments as for `cluster_layers`.

    Raises:
        NoLayersError: Work is too uneven for `eps`.
    """
    windows = _Windows.of(flops, heavy, num_layers, eps)

    def most_received(before: np.ndarray, column: np.ndarray, *_: object) -> np.ndarray:
        return np.maximum(before, column)

    least = _least_received(windows, received())
    bottleneck = np.inf
    # Good layers start where little is received: try only those starts first.
    for share in (0.05, 0.3, 1.0):
        limit = min(bottleneck, np.quantile(least, share, method="lower"))
        bottleneck = min(bottleneck, _least(windows, least <= limit, received(), most_received)[0])
        if bottleneck <= limit:
            break
    if not np.isfinite(bottleneck):
        raise NoLayersError(
            f"no {num_layers} layers with at least {windows.least_heavy} heavy equations each do at"
            f" most {1 + eps:g} times the average work; use a larger eps or another number of"
            " layers"
        )
    work = np.append(0.0, np.cumsum(flops)) / max(np.sum(flops), 1.0)

    def unevenness(
        before: np.ndarray, column: np.ndarray, starts: np.ndarray, stop: int
    ) -> np.ndarray:
        return before + np.where(column <= bottleneck, (work[stop] - work[starts]) ** 2, np.inf)

    _, stops = _least(windows, least <= bottleneck, received(), unevenness)
    return stops


def _least_eps(flops: np.ndarray, received: Received, num_layers: int, heavy: np.ndarray) -> float:
    """Return the smallest `eps` with which there are layers; arguments as for `cluster_layers`."""
    windows = _Windows.of(flops, heavy, num_layers, float(num_layers))
    heavies = np.append(0, np.cumsum(heavy))
    work = np.append(0.0, np.cumsum(np.where(heavy, flops, 0.0)))

    def most_work(
        before: np.ndarray, column: np.ndarray, starts: np.ndarray, stop: int
    ) -> np.ndarray:
        is_smallest = heavies[stop] - heavies[starts] == windows.least_heavy
        return np.maximum(before, np.where(is_smallest, 0.0, work[stop] - work[starts]))

    everywhere = np.ones(len(flops), bool)
    least, _ = _least(windows, everywhere, received(), most_work)
    return least * num_layers / work[-1] - 1


type SizedValue = tuple[int, float, Sequence[int]]
"""(equation that computes it, bytes, equations that use it in order)."""


def after_heavy(heavy: np.ndarray, values: Iterable[SizedValue]) -> np.ndarray:
    """Return which equations depend on the result of a heavy one, [equations].

    Args:
        heavy: which equations are heavy, [equations].
        values: the values that equations pass on, in the order of the equations that compute them.
    """
    reached = heavy.astype(bool)
    for producer, _, users in values:
        if reached[producer]:
            reached[list(users)] = True
    return reached


def received_bytes(num_equations: int, values: Sequence[SizedValue]) -> Received:
    """Return the function of the bytes that layers receive.

    A layer receives a value once, no matter how often it uses it.

    Args:
        num_equations: the number of equations.
        values: the values that equations pass on. Parameters and other inputs of the step are not
            included.
    """
    used_by: list[list[int]] = [[] for _ in range(num_equations)]
    for value, (_, _, users) in enumerate(values):
        for user in users:
            used_by[user].append(value)

    def columns() -> Iterator[np.ndarray]:
        column = np.zeros(num_equations)
        # The last equation that computes or uses a value. Layers that start later receive it.
        last_access = [producer for producer, _, _ in values]
        for equation in range(num_equations):
            for value in used_by[equation]:
                column[last_access[value] + 1 : equation + 1] += values[value][1]
                last_access[value] = equation
            yield column[: equation + 1]

    return columns


@dataclass(frozen=True, slots=True)
class _Windows:
    """The feasible layers.

    Attributes:
        num_layers: the number of layers.
        least_heavy: the least number of heavy equations of a layer.
        first: for each stop the first feasible start.
        after: for each stop the start after the last feasible one.
        fewest: for each stop the least number of layers before it in `num_layers` layers.
        most: for each stop the largest number of layers before it.
    """

    num_layers: int
    least_heavy: int
    first: np.ndarray
    after: np.ndarray
    fewest: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, flops: np.ndarray, heavy: np.ndarray, num_layers: int, eps: float) -> "_Windows":
        """Return the feasible layers; arguments as for `cluster_layers`."""
        heavies = np.append(0, np.cumsum(heavy))
        work = np.append(0.0, np.cumsum(np.where(heavy, flops, 0.0)))
        least = min(MIN_HEAVY, int(heavies[-1]) // num_layers)
        most_work = (1 + eps) * work[-1] / num_layers * (1 + 1e-9)
        first = np.minimum(
            np.searchsorted(work, work - most_work), np.searchsorted(heavies, heavies - least)
        )
        after = np.searchsorted(heavies, heavies - least, side="right")
        size = len(work)
        last_stop = np.searchsorted(first, np.arange(size), side="right") - 1
        before = np.zeros(size, int)
        behind = np.zeros(size, int)
        for stop in range(1, size):
            before[stop] = before[first[stop]] + 1
        for start in range(size - 2, -1, -1):
            behind[start] = behind[last_stop[start]] + 1
        fewest = np.maximum(before, num_layers - (heavies[-1] - heavies) // least)
        most = np.minimum(heavies // least, num_layers - behind)
        return cls(num_layers, least, first, after, fewest, most)


def _least_received(windows: _Windows, columns: Iterable[np.ndarray]) -> np.ndarray:
    """Return the least bytes that a layer from each start receives; -inf for start 0."""
    least = np.full(len(windows.first) - 1, np.inf)
    for stop, column in enumerate(columns, start=1):
        starts = slice(windows.first[stop], windows.after[stop])
        np.minimum(least[starts], column[starts], out=least[starts])
    least[0] = -np.inf
    return least


type _Step = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""A function (objective before [layers, start], bytes received [start], starts, stop) -> objective
[layers, start]."""


def _least(
    windows: _Windows, useful: np.ndarray, columns: Iterable[np.ndarray], step: _Step
) -> tuple[float, tuple[int, ...]]:
    """Return the least objective and the stops of its layers, which start at `useful` equations."""
    size = len(windows.first)
    cuts = np.flatnonzero(useful)
    first = np.searchsorted(cuts, windows.first)
    after = np.searchsorted(cuts, windows.after)
    best = np.full((windows.num_layers + 1, len(cuts) + 1), np.inf)
    choice = np.zeros((windows.num_layers + 1, len(cuts) + 1), int)
    best[0, 0] = 0.0
    position = {int(stop): i for i, stop in enumerate([*cuts, size - 1])}
    for stop, column in enumerate(columns, start=1):
        if stop in position:
            low = max(1, windows.fewest[stop])
            high = windows.most[stop] + 1
            begin = first[stop]
            end = after[stop]
            if low < high and begin < end:
                starts = cuts[begin:end]
                costs = step(best[low - 1 : high - 1, begin:end], column[starts], starts, stop)
                chosen = costs.argmin(axis=1)
                best[low:high, position[stop]] = costs[np.arange(high - low), chosen]
                choice[low:high, position[stop]] = chosen + begin
    stops = []
    stop = size - 1
    column = len(cuts)
    for layer in range(windows.num_layers, 0, -1):
        stops.append(int(stop))
        column = choice[layer, column]
        stop = cuts[column]
    return float(best[-1, -1]), tuple(reversed(stops))
