"""Effect of a task with contention on its streams: a piecewise-linear function of one number.

How much is computed beside a collective depends on when the collective starts, and so on the lag:
how much longer its link is busy than the compute stream when the task begins, e.g. with a send. If
the task waits for all collectives that it starts and uses one class of links, its effect depends on
nothing else. The times at which both streams are free are then piecewise linear in the lag.

At the beginning of each piece the task is played once by `stream_rules`, with straight lines for
times. The piece ends where the first comparison of two lines turns.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from simulator.engine.priced_ops import PricedOps, links_of, merge_kernels, waits_for_all
from simulator.engine.stream_rules import MeshStreams
from simulator.spans import Link

_MAX_PIECES = 256  # The engine plays a task of more pieces faster.

Row = tuple[float, float, float, float, float]
"""A piece: the lag where it begins, the seconds until the compute stream and the link are free
there, and the slopes of both."""


@dataclass(frozen=True, slots=True)
class PiecewiseEffect:
    """When a mesh's compute stream and link are free after a task, by the lag of the link.

    Both times are in seconds after the compute stream was free before the task.

    Attributes:
        pieces: by increasing lag; the first begins at lag 0.
        link: the class of links that the task uses.
    """

    pieces: tuple[Row, ...]
    link: Link = "within hosts"

    def at(self, lag: float) -> tuple[float, float]:
        """Return when the compute stream and the link are free after the task.

        Args:
            lag: seconds for which the link is busy longer than the compute stream before the task.
        """
        lag = max(0.0, lag)
        begin, compute, link, compute_slope, link_slope = next(
            row for row in reversed(self.pieces) if row[0] <= lag
        )
        return compute + (lag - begin) * compute_slope, link + (lag - begin) * link_slope


def piecewise_effect(ops: PricedOps) -> PiecewiseEffect | None:
    """Return the effect of a task, if nothing but sends is under way when it begins.

    Returns None if the task leaves a collective running, uses several classes of links, or has more
    pieces than are worth computing.
    """
    ops = merge_kernels(ops)
    links = links_of(ops)
    if len(links) > 1 or not waits_for_all(ops):
        return None
    link: Link = links.pop() if links else "within hosts"
    pieces = _pieces(ops, link)
    return None if pieces is None else PiecewiseEffect(pieces, link)


@lru_cache(maxsize=1 << 12)
def _pieces(ops: PricedOps, link: Link) -> tuple[Row, ...] | None:
    pieces: list[Row] = []
    lag = 0.0
    while lag < inf:
        if len(pieces) == _MAX_PIECES:
            return None
        order = _Order()
        streams = _LinearStreams(link, order)
        streams.free[link] = _Line(lag, 1.0, order)
        streams.play(ops)
        compute, free = streams.compute, streams.free[link]
        pieces.append((lag, compute.value, free.value, compute.slope, free.slope))
        # Smaller breakpoints are rounding errors.
        lag += max(1e-9 * (lag + compute.value), order.breakpoint)
    return tuple(pieces)


@dataclass(slots=True)
class _Order:
    """The order of the lines that were compared.

    Attributes:
        breakpoint: the smallest increase of the lag at which the order of two of them changes.
    """

    breakpoint: float = inf


@dataclass(slots=True)
class _Line:
    """A time that is linear in the lag: its value at the lag of the piece's beginning, its slope.

    One line is less than another if it is so at that lag and at slightly larger ones.
    """

    value: float
    slope: float
    order: _Order = field(compare=False, repr=False)

    def __add__(self, other: "_Line") -> "_Line":
        return _Line(self.value + other.value, self.slope + other.slope, self.order)

    def __sub__(self, other: "_Line") -> "_Line":
        return _Line(self.value - other.value, self.slope - other.slope, self.order)

    def __mul__(self, factor: float) -> "_Line":
        return _Line(self.value * factor, self.slope * factor, self.order)

    def __truediv__(self, factor: float) -> "_Line":
        return _Line(self.value / factor, self.slope / factor, self.order)

    def __bool__(self) -> bool:
        return bool(self.value or self.slope)

    def __lt__(self, other: "_Line") -> bool:
        less = other.value - self.value
        steeper = self.slope - other.slope
        if steeper and less / steeper > 0:
            self.order.breakpoint = min(self.order.breakpoint, less / steeper)
        return less > 0 or (less == 0 and steeper < 0)


class _LinearStreams(MeshStreams[_Line]):
    """Streams whose times are linear in the lag of a link."""

    def __init__(self, link: Link, order: _Order) -> None:
        super().__init__(lambda seconds: _Line(seconds, 0.0, order))
        self._link: Link = link

    def repeat(self, iterations: int, ops: PricedOps) -> None:
        """Run iterations until the streams begin one together. All others are equal to that one."""
        for iteration in range(iterations):
            if any(self.under_way.values()) or self.compute < self.free[self._link]:
                self.play(ops)
                continue
            first = _LinearStreams(self._link, _Order())
            first.play(ops)
            last = self.compute + first.compute * (iterations - iteration - 1)
            self.compute = last + first.compute
            self.free[self._link] = last + first.free[self._link]
            return
