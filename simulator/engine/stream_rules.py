"""The rules by which the streams of one mesh advance: overlap and contention, defined once.

All devices of a mesh do the same at the same time. A mesh therefore has one compute stream and, for
each class of links, one communication stream.

- *Compute.* Kernels run in order.
- *Transfer.* A transfer starts when the compute stream has issued it and its link is free. A link
  carries one transfer after the other, in the order of their issue; different links work at the
  same time. (XLA:GPU issues collectives on streams of their own. It keeps the order on each stream,
  and NCCL runs two collectives that share a link one after the other. A ring over several hosts is
  assumed to leave the links within them free.)
- *Wait.* The compute stream idles until a transfer ends.
- *Contention.* A transfer with a contention factor above 1 (`simulator.hardware.cluster.Link`) runs
  that many times slower while a kernel runs beside it. The kernel runs slower by the largest factor
  of the transfers beside it. The end of such a transfer is known once the compute stream gets
  there, or waits. Once a value is sent to another mesh, the transfers under way on the same link
  continue at full speed.

Faster hardware is therefore never slower on one mesh, nor in pipelines whose tasks wait for the
collectives that they start, as compiled tasks do. In other pipelines, a collective that starts
earlier may have done more of its work before a send, and slowed more kernels. There, faster
hardware takes longer by at most the contention factor. All this holds for factors up to 2, beyond
which running together takes longer than one after the other; `Link` refuses those.

`MeshStreams` states the rules for times of any kind that can be added, scaled and compared. Every
faster form is derived from it:

- `simulator.engine.streams` is `MeshStreams` over floats, with a record of what happens. It skips
  iterations of loops that repeat each other.
- `simulator.engine.max_plus` plays the unit vectors of the max-plus algebra, which determine the
  effect of a task without contention at any times.
- `simulator.engine.contended_effect` plays straight lines, the times as functions of the lag of the
  link behind the compute stream.
- `added_seconds` is the closed form for one kernel beside one transfer.

Property tests prove that each form equals the rules.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from simulator.engine.priced_ops import Begin, Compute, End, PricedOps, Repeat
from simulator.spans import LINKS, Link


class Time(Protocol):
    """A number of seconds; zero is false."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, factor: float, /) -> Self: ...
    def __truediv__(self, factor: float, /) -> Self: ...
    def __lt__(self, other: Self, /) -> bool: ...


@dataclass(slots=True)
class Transfer[T: Time]:
    """A transfer that is under way or waits for its link.

    Attributes:
        left: seconds that remain if nothing else runs.
        contention_factor: how many times slower it is, and makes kernels, while they run together.
        start: when it started, if it has.
        end: when it ends; set once that is known.
    """

    name: str
    link: Link
    left: T
    contention_factor: float
    start: T | None = field(default=None, init=False)
    end: T = field(init=False)

    def advance(self, time: T, seconds: T) -> None:
        """Do `seconds` of the work that is left, from `time` on."""
        if self.start is None:
            self.start = time
        self.left = self.left - seconds


class MeshStreams[T: Time]:
    """The streams of one mesh.

    Attributes:
        compute: until when the compute stream is busy.
        free: until when each class of links is busy with transfers whose end is known.
        under_way: for each class of links, the transfers whose end depends on what is computed.
        timed: the transfers whose end is known and which the compute stream hasn't waited for yet.
    """

    def __init__(self, number: Callable[[float], T]) -> None:
        """Create streams that are free at time 0; `number` makes a time of seconds."""
        self.number = number
        self.compute = number(0.0)
        self.free: dict[Link, T] = {link: number(0.0) for link in LINKS}
        self.under_way: dict[Link, deque[Transfer[T]]] = {link: deque() for link in LINKS}
        self.timed: dict[str, Transfer[T]] = {}

    def play(self, ops: PricedOps) -> None:
        """Run a task."""
        for op in ops:
            match op:
                case Compute():
                    self.run(self.number(op.seconds))
                case Begin():
                    seconds = self.number(op.seconds)
                    self.issue(Transfer(op.name, op.link, seconds, op.contention_factor))
                case End():
                    transfer = self.finish_named(op.name)
                    if transfer is None:
                        raise ValueError(
                            f"waits for collective {op.name!r}, which the same task has not"
                            " started just before"
                        )
                    self.wait_until(transfer.end)
                case Repeat():
                    self.repeat(op.iterations, op.ops)

    def repeat(self, iterations: int, ops: PricedOps) -> None:
        """Run a loop, one iteration after the other."""
        for _ in range(iterations):
            self.play(ops)

    def run(self, seconds: T) -> None:
        """Compute for `seconds`, or longer while a transfer contends."""
        while seconds and any(self.under_way.values()):
            active: list[Transfer[T]] = []
            until_free: dict[Link, T] = {}
            for link, queue in self.under_way.items():
                if queue and self.compute < self.free[link]:
                    until_free[link] = self.free[link] - self.compute
                elif queue:
                    active.append(queue[0])
            contention = max((transfer.contention_factor for transfer in active), default=1.0)
            until_computed = seconds * contention
            until_ended = [transfer.left * transfer.contention_factor for transfer in active]
            # The next event is the first of: the kernel ends, a transfer ends, a link gets free.
            passed = min(until_computed, *until_ended, *until_free.values())
            start = self.compute
            self.compute = start + passed
            for transfer, until_end in zip(active, until_ended, strict=True):
                ends = passed == until_end
                alone = passed / transfer.contention_factor
                transfer.advance(start, transfer.left if ends else alone)
                if not transfer.left:
                    self.finish_first(transfer.link)
            for link, until in until_free.items():
                if passed == until:  # which rounding must not leave a little short
                    self.compute = max(self.compute, self.free[link])
            if passed == until_computed:
                return
            seconds = seconds - passed / contention
        self.compute = self.compute + seconds

    def issue(self, transfer: Transfer[T]) -> None:
        """Queue a transfer on its link."""
        queue = self.under_way[transfer.link]
        queue.append(transfer)
        if transfer.contention_factor == 1 and len(queue) == 1:
            self.finish_first(transfer.link)

    def occupy(self, link: Link, seconds: T) -> T:
        """Keep a link busy from when it and the compute stream are free; return that time."""
        start = max(self.compute, self.free[link])
        self.free[link] = start + seconds
        return start

    def finish_first(self, link: Link) -> Transfer[T]:
        """Let the first transfer on a link continue at full speed until it ends."""
        transfer = self.under_way[link].popleft()
        start = self.occupy(link, transfer.left)
        transfer.advance(start, transfer.left)
        transfer.end = self.free[link]
        self.timed[transfer.name] = transfer
        return transfer

    def settle(self, link: Link) -> None:
        """Let all transfers on a link continue at full speed."""
        while self.under_way[link]:
            self.finish_first(link)

    def finish_named(self, name: str) -> Transfer[T] | None:
        """Finish and return the transfer of that name, for which the compute stream waits now."""
        for link, queue in self.under_way.items():
            while any(transfer.name == name for transfer in queue):
                self.finish_first(link)
        return self.timed.pop(name, None)

    def wait_until(self, time: T) -> None:
        """Let the compute stream idle until `time`, while transfers continue at full speed."""
        if not self.compute < time:
            return
        for link, queue in self.under_way.items():
            while queue and (start := max(self.compute, self.free[link])) < time:
                first = queue[0]
                if time < start + first.left:
                    first.advance(start, time - start)
                    break
                self.finish_first(link)
        self.compute = time


def added_seconds(communication: float, compute: float, contention_factor: float) -> float:
    """Return the seconds that a transfer adds to a kernel that starts with it.

    The closed form of `MeshStreams` for one kernel of `compute` seconds beside one transfer of
    `communication` seconds, which the compute stream waits for afterwards. What is not hidden is
    added in full, what is hidden by its contention. Infinite `compute` hides any transfer.
    """
    return max(0.0, communication - compute) + (contention_factor - 1) * min(communication, compute)
