"""Effect of a task on its streams where computation and collectives slow each other: a piecewise-linear function of one number.

How much is computed beside a collective depends on when the collective starts, and so on how far its class of links lags behind the
compute stream when the task begins: there may be something on its way to another mesh. If the task waits for all that it starts, and
uses one class of links, it depends on nothing else, and both streams are free at times that are straight lines in the lag, from one
breakpoint to the next. At the beginning of each of these pieces the task is played once, with times that are lines; the piece ends where
the first comparison between two of them turns.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple, assert_never

from simulator.costs.cost_model import CostModel, collective_seconds, kernel_seconds
from simulator.spans import Link
from simulator.work import Done, Kernel, Loop, OpList, Start, on_devices

_MAX_PIECES = 256  # of a task that has more of them, the engine finds the time sooner

Row = tuple[float, float, float, float, float]
"""A piece: the lag where it begins, seconds until the compute and the communication stream are free there, and their slopes."""


@dataclass(frozen=True, slots=True)
class PiecewiseEffect:
    """When the compute stream of a mesh and the link that it uses are free after a task, in seconds after the first was free before it."""

    pieces: tuple[Row, ...]
    link: Link = "within hosts"

    def at(self, lag: float) -> tuple[float, float]:
        """When compute and communication stream are free, if communication is busy for `lag` seconds longer than compute."""
        begin, compute, communication, *slopes = next(
            row for row in reversed(self.pieces) if row[0] <= max(0.0, lag)
        )
        beyond = max(0.0, lag) - begin
        return compute + beyond * slopes[0], communication + beyond * slopes[1]


def piecewise_effect_of(
    body: OpList, costs: CostModel, devices: tuple[int, ...]
) -> PiecewiseEffect | None:
    """The effect of a body on the mesh of `devices`, as `simulator.engine.simulation.simulate` plays it where nothing else is under way but
    what was sent. None if it leaves a collective that nobody waited for, uses several classes of links, or has more pieces than are worth it.
    """
    ops, links = tuple(_priced(body, costs, devices)), set(_links(body, costs, devices))
    if len(links) > 1 or not _waits_for_all(ops) or (pieces := _pieces(ops)) is None:
        return None
    return PiecewiseEffect(pieces, *links)


def _links(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> Iterator[Link]:
    for op in body:
        match op:
            case Start(each):
                yield costs.link(on_devices(each, devices))
            case Loop(_, inner):
                yield from _links(inner, costs, devices)
            case _:
                pass


class _Compute(NamedTuple):
    seconds: float


class _Begin(NamedTuple):
    name: str
    seconds: float
    slowdown: float


class _End(NamedTuple):
    name: str


class _Repeat(NamedTuple):
    turns: int
    ops: "_Ops"


type _Op = _Compute | _Begin | _End | _Repeat
type _Ops = tuple[_Op, ...]


def _priced(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> Iterator[_Op]:
    """The seconds of a body; kernels that follow one another are one."""
    seconds = 0.0
    for op in body:
        match op:
            case Kernel():
                seconds += kernel_seconds(costs, op, devices[0])
                continue
            case Loop(count, inner):
                ops = tuple(_priced(inner, costs, devices))
                if all(isinstance(each, _Compute) for each in ops):
                    seconds += count * sum(
                        each.seconds for each in ops if isinstance(each, _Compute)
                    )
                    continue
                priced = _Repeat(count, ops)
            case Start(each):
                groups = on_devices(each, devices)
                priced = _Begin(
                    each.name,
                    collective_seconds(costs, each, groups),
                    costs.contention_factor(groups),
                )
            case Done(name):
                priced = _End(name)
            case _:
                assert_never(op)
        if seconds:
            yield _Compute(seconds)
            seconds = 0.0
        yield priced
    if seconds:
        yield _Compute(seconds)


def _waits_for_all(ops: _Ops) -> bool:
    """Whether each collective is waited for once it runs, in the same turn of the same loop."""
    running: set[str] = set()
    for op in ops:
        match op:
            case _Begin(name):
                if name in running:
                    return False
                running.add(name)
            case _End(name):
                if name not in running:
                    return False
                running.remove(name)
            case _Repeat(_, inner):
                if not _waits_for_all(inner):
                    return False
            case _Compute():
                pass
    return not running


@lru_cache(maxsize=1 << 12)
def _pieces(ops: _Ops) -> tuple[Row, ...] | None:
    pieces: list[Row] = []
    lag = 0.0
    while lag < inf:
        if len(pieces) == _MAX_PIECES:
            return None
        played = _Played(_ZERO, _Line(lag, 1.0))
        played.play(ops)
        compute, communication = played.compute, played.communication
        pieces.append((lag, compute.value, communication.value, compute.slope, communication.slope))
        least = 1e-9 * (lag + compute.value)  # what turns sooner does so by rounding
        lag += max(least, played.turn)
    return tuple(pieces)


class _Line(NamedTuple):
    """A time, and how much later it is for each second of lag more."""

    value: float
    slope: float

    def plus(self, other: "_Line", times: float = 1.0) -> "_Line":
        return _Line(self.value + times * other.value, self.slope + times * other.slope)


_ZERO = _Line(0.0, 0.0)


@dataclass(slots=True)
class _UnderWay:
    name: str
    left: _Line
    slowdown: float


@dataclass(slots=True)
class _Played:
    """The streams of one mesh, as `simulator.engine.streams.Streams`, with lines for times.

    Attributes:
        turn: the least seconds of lag more with which something is no longer before, or after, something else.
    """

    compute: _Line
    communication: _Line
    turn: float = inf
    under_way: deque[_UnderWay] = field(default_factory=deque)
    ends: dict[str, _Line] = field(default_factory=dict)

    def play(self, ops: _Ops) -> None:
        for op in ops:
            match op:
                case _Compute(seconds):
                    self._compute(_Line(seconds, 0.0))
                case _Begin(name, seconds, slowdown):
                    self.under_way.append(_UnderWay(name, _Line(seconds, 0.0), slowdown))
                    if slowdown == 1 and len(self.under_way) == 1:
                        self._finish()
                case _End(name):
                    while any(each.name == name for each in self.under_way):
                        self._finish()
                    self._wait_until(self.ends.pop(name))
                case _Repeat(count, inner):
                    self._repeat(count, inner)

    def _before(self, one: _Line, other: _Line) -> bool:
        """Whether `one` is less, for the lag at hand and a little more."""
        less, steeper = other.value - one.value, one.slope - other.slope
        if steeper and less / steeper > 0:
            self.turn = min(self.turn, less / steeper)
        return less > 0 or (less == 0 and steeper < 0)

    def _later(self, one: _Line, other: _Line) -> _Line:
        return other if self._before(one, other) else one

    def _compute(self, seconds: _Line) -> None:
        while self.under_way and self._before(_ZERO, seconds):
            if self._before(self.compute, self.communication):
                alone = self.communication.plus(self.compute, -1)
                alone = alone if self._before(alone, seconds) else seconds
                self.compute, seconds = self.compute.plus(alone), seconds.plus(alone, -1)
                continue
            each = self.under_way[0]
            ends = not self._before(seconds, each.left)
            together = each.left if ends else seconds
            each.left, seconds = each.left.plus(together, -1), seconds.plus(together, -1)
            self.compute = self.compute.plus(together, each.slowdown)
            if ends:
                self._finish()
        self.compute = self.compute.plus(seconds)

    def _finish(self) -> None:
        each = self.under_way.popleft()
        self.communication = self._later(self.compute, self.communication).plus(each.left)
        self.ends[each.name] = self.communication

    def _wait_until(self, time: _Line) -> None:
        if not self._before(self.compute, time):
            return
        while self.under_way:
            begin = self._later(self.compute, self.communication)
            if not self._before(begin, time):
                break
            each = self.under_way[0]
            if self._before(time, begin.plus(each.left)):
                each.left = each.left.plus(time.plus(begin, -1), -1)
                break
            self._finish()
        self.compute = time

    def _repeat(self, count: int, ops: _Ops) -> None:
        """Turn by turn until the streams begin one together: from there on all turns are the same."""
        for turn in range(count):
            if not self.under_way and not self._before(self.compute, self.communication):
                same = _Played(_ZERO, _ZERO)
                same.play(ops)
                last = self.compute.plus(same.compute, count - turn - 1)
                self.compute, self.communication = (
                    last.plus(same.compute),
                    last.plus(same.communication),
                )
                return
            self.play(ops)
