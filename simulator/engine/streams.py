"""The streams of one mesh, in which `simulator.engine.simulation` puts its work: when each is busy, and what it waits for.

Each class of links takes one thing after the other, in the order in which the compute stream hands them over; what goes over different
classes goes on at the same time. (XLA:GPU issues collectives on streams of their own; what it does on one of them is in order, and NCCL
gives two that share a link no more than one after the other. A ring over several hosts is taken to leave links within them free.)

Where computation and collectives slow each other (`Link.contention_factor`), both go on at a part of their speed while they share a device, so
when a collective ends depends on what is computed beside it; computation is as slow as the worst of what goes on beside it. It is known when the compute stream has come so far, or waits; once a
value is sent to another mesh, what is still under way goes on at full speed.

So faster hardware is never slower on one mesh, nor in pipelines whose tasks wait for the collectives that they start, as compiled ones do.
In other pipelines more of a collective may come before a send, and slow what is beside it, the earlier it starts: there faster hardware
takes at most `slowdown` times as long, as sharing never takes longer than that (all this for slowdowns up to 2, which `Link` asserts).
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Literal, assert_never

from simulator.costs.cost_model import CostModel, collective_seconds, kernel_seconds
from simulator.memory import Level
from simulator.spans import LINKS, Category, Link, Span, Stream
from simulator.work import (
    Collective,
    Done,
    Groups,
    Kernel,
    Loop,
    OpList,
    Start,
    TrainingPhase,
    on_devices,
)


@dataclass(slots=True)
class Transfer:
    """A collective that is under way, or waits for its turn.

    Attributes:
        left: seconds that remain of it if nothing else goes on.
        start: when it began.
    """

    collective: Collective
    task: str
    left: float
    slowdown: float
    start: float = inf

    def go_on(self, time: float, seconds: float) -> None:
        """Get so many seconds further, from `time` on."""
        self.start, self.left = min(self.start, time), self.left - seconds


type _Clock = Literal["compute", "host"] | Link


@dataclass(slots=True)
class Streams:
    """The streams of one mesh: `compute`, `host` and each class of links of `free` say until when they are busy.

    Attributes:
        launch: seconds of the host for each kernel and collective, none of which starts before it is launched.
    """

    mesh: int
    devices: tuple[int, ...]
    costs: CostModel
    task: str = ""
    compute: float = 0.0
    free: dict[Link, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    host: float = 0.0
    launch: float = 0.0
    running: dict[str, tuple[float, Collective]] = field(
        default_factory=dict
    )  # not waited for yet: when each ends
    under_way: dict[Link, deque[Transfer]] = field(
        default_factory=lambda: {link: deque() for link in LINKS}
    )
    spans: list[Span] = field(default_factory=list)
    levels: list[tuple[float, Level]] = field(default_factory=list)
    num_levels: int = 0
    groups: dict[Groups, Groups] = field(default_factory=dict)
    links: dict[Groups, Link] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When all is done that it was given so far."""
        return max(self.compute, *self.free.values())

    def dispatch(self, name: str, seconds: float) -> None:
        """Let the host hand over an instruction, for which the devices wait."""
        start, self.host = self.host, self.host + seconds
        self._record(name, "host", start, self.host, "dispatch")
        self.wait_until(self.host, name, "host")

    def record_launches(self, name: str, since: float) -> None:
        """That the host was busy with launches since then."""
        if self.host > since:
            self._record(name, "host", since, self.host, "dispatch")

    def play(self, body: OpList) -> None:
        for op in body:
            match op:
                case Kernel():
                    self._launch(op.name)
                    start = self.compute
                    self._compute(kernel_seconds(self.costs, op, self.devices[0]))
                    self._record(op.name, "compute", start, self.compute, op.kind, phase=op.phase)
                case Start(collective):
                    self._launch(collective.name)
                    self._start(collective)
                case Done(name):
                    for link in LINKS:
                        while any(
                            transfer.collective.name == name for transfer in self.under_way[link]
                        ):
                            self._finish(link)
                    if name not in self.running:
                        raise ValueError(
                            f"task {self.task}: waits for collective {name!r}, which is not running"
                        )
                    end, collective = self.running.pop(name)
                    self.wait_until(end, name, "wait", collective)
                case Loop():
                    self._loop(op)
                case _:
                    assert_never(op)

    def communicate(
        self, name: str, seconds: float, category: Category, link: Link, axis: str = ""
    ) -> Span:
        """Hand a transfer that disturbs nobody to the link now."""
        self.settle(link)
        start = max(self.compute, self.free[link])
        self.free[link] = end = start + seconds
        span = Span(
            name, self.mesh, "communication", start, end, category, self.task, link=link, axis=axis
        )
        self.spans.append(span)
        return span

    def settle(self, link: Link) -> None:
        """Let what is under way over a link go on at full speed from now on."""
        while self.under_way[link]:
            self._finish(link)

    def link(self, groups: Groups) -> Link:
        """What the devices of `groups` communicate over."""
        if groups not in self.links:
            self.links[groups] = self.costs.link(groups)
        return self.links[groups]

    def uses(self, link: Link, body: OpList) -> bool:
        """Whether a body communicates over a link."""
        for op in body:
            match op:
                case Start(collective) if self.link(self._global(collective)) == link:
                    return True
                case Loop(_, inner) if self.uses(link, inner):
                    return True
                case _:
                    pass
        return False

    def record_levels(self, start: float, levels: tuple[tuple[Level, Level], ...]) -> None:
        """What the mesh holds from `start` on while its next instruction runs, and from now on after it."""
        during, after = levels[self.num_levels]
        self.levels += [(start, during), (self.compute, after)]
        self.num_levels += 1

    def wait_until(
        self, time: float, name: str, category: Category, awaited: Collective | None = None
    ) -> None:
        """Let the compute stream idle until `time`, while collectives go on."""
        if time > self.compute:
            for link, queue in self.under_way.items():
                while queue and (begin := max(self.compute, self.free[link])) < time:
                    if begin + queue[0].left > time:
                        queue[0].go_on(begin, time - begin)
                        break
                    self._finish(link)
            kind, axis = (awaited.kind, awaited.axis) if awaited else (None, "")
            self._record(name, "compute", self.compute, time, category, kind, axis=axis)
            self.compute = time

    def _launch(self, name: str) -> None:
        if self.launch:
            self.host += self.launch
            self.wait_until(self.host, name, "host")

    def _start(self, collective: Collective) -> None:
        """Hand a collective to its link now."""
        groups = self._global(collective)
        seconds = collective_seconds(self.costs, collective, groups)
        slowdown, link = self.costs.contention_factor(groups), self.link(groups)
        if slowdown == 1 and not self.under_way[link]:
            span = self.communicate(
                collective.name, seconds, collective.kind, link, collective.axis
            )
            self.running[collective.name] = span.end, collective
        else:
            self.under_way[link].append(Transfer(collective, self.task, seconds, slowdown))

    def _compute(self, seconds: float) -> None:
        """Compute for so long, or longer where a collective goes on meanwhile."""
        while seconds and any(self.under_way.values()):
            waiting: list[Link] = [
                link
                for link, queue in self.under_way.items()
                if queue and self.free[link] > self.compute
            ]
            going: list[Link] = [
                link
                for link, queue in self.under_way.items()
                if queue and self.free[link] <= self.compute
            ]
            slowdown = max((self.under_way[link][0].slowdown for link in going), default=1.0)
            # what happens next: this ends, a collective ends, or what was sent before one has arrived, which then begins
            ends: dict[Link, float] = {
                link: self.under_way[link][0].left * self.under_way[link][0].slowdown
                for link in going
            }
            passed = min(
                seconds * slowdown,
                *ends.values(),
                *(self.free[link] - self.compute for link in waiting),
            )
            start = self.compute
            self.compute += passed
            seconds = 0.0 if passed == seconds * slowdown else seconds - passed / slowdown
            for link, until_end in ends.items():
                transfer = self.under_way[link][0]
                transfer.go_on(
                    start, transfer.left if passed == until_end else passed / transfer.slowdown
                )
                if not transfer.left:
                    self._finish(link)
            for link in waiting:
                if passed == self.free[link] - start:
                    self.compute = max(self.compute, self.free[link])
        self.compute += seconds

    def _finish(self, link: Link) -> None:
        """Let the first of what is under way over a link go on alone until it ends."""
        each = self.under_way[link].popleft()
        start = max(self.compute, self.free[link])
        self.free[link] = end = start + each.left
        each.go_on(start, each.left)
        name, kind, axis = each.collective.name, each.collective.kind, each.collective.axis
        self.running[name] = end, each.collective
        self.spans.append(
            Span(
                name,
                self.mesh,
                "communication",
                each.start,
                end,
                kind,
                each.task,
                link=link,
                axis=axis,
            )
        )

    def _loop(self, loop: Loop) -> None:
        """Play iterations until they repeat one another, then skip ahead."""
        last = None
        for iteration in range(1, loop.count + 1):
            first_span, before, running = len(self.spans), self._clocks(), dict(self.running)
            self.play(loop.body)
            if any(self.under_way.values()):
                last = None
                continue
            steps: dict[_Clock, float] = {
                clock: time - before[clock] for clock, time in self._clocks().items()
            }
            lags = [max(0.0, time - self.compute) for time in self.free.values()]
            lags.append(self.compute - self.host if self.launch else 0.0)
            if last is not None and _steady(*last, steps, lags):
                started = {name for name, end in self.running.items() if running.get(name) != end}
                self._skip(loop.count - iteration, steps, self.spans[first_span:], started)
                return
            last = steps, lags

    def _clocks(self) -> dict[_Clock, float]:
        return {"compute": self.compute, "host": self.host, **self.free}

    def _skip(
        self, count: int, steps: dict[_Clock, float], pattern: list[Span], started: set[str]
    ) -> None:
        """Add `count` more iterations that advance the clocks by `steps`, as `pattern` did."""
        if not count:
            return
        begins = self._clocks()
        busy: defaultdict[
            tuple[Stream, Category, Category | None, Link | None, TrainingPhase, str], float
        ] = defaultdict(float)
        for span in pattern:
            busy[span.stream, span.category, span.awaited, span.link, span.phase, span.axis] += (
                count * span.seconds
            )
        for (stream, category, awaited, link, part, axis), seconds in busy.items():
            name, clock = (
                f"{count} x {category}",
                link or ("host" if stream == "host" else "compute"),
            )
            begin, end = begins[clock], begins[clock] + count * steps[clock]
            span = Span(
                name,
                self.mesh,
                stream,
                begin,
                end,
                category,
                self.task,
                seconds,
                awaited,
                link,
                part,
                axis,
            )
            self.spans.append(span)
        self.compute += count * steps["compute"]
        self.host += count * steps["host"]
        for link in LINKS:
            self.free[link] += count * steps[link]
        for name in started:
            end, collective = self.running[name]
            link = self.link(self._global(collective))
            self.running[name] = end + count * steps[link], collective

    def _global(self, collective: Collective) -> Groups:
        """Its groups in ids of the cluster."""
        if collective.groups not in self.groups:
            self.groups[collective.groups] = on_devices(collective, self.devices)
        return self.groups[collective.groups]

    def _record(
        self,
        name: str,
        stream: Stream,
        start: float,
        end: float,
        category: Category,
        awaited: Category | None = None,
        phase: TrainingPhase = "",
        axis: str = "",
    ) -> None:
        self.spans.append(
            Span(
                name,
                self.mesh,
                stream,
                start,
                end,
                category,
                self.task,
                awaited=awaited,
                phase=phase,
                axis=axis,
            )
        )


def _steady(
    last: dict[_Clock, float], lagged: list[float], now: dict[_Clock, float], lag: list[float]
) -> bool:
    """The clocks advanced as in the iteration before, and neither communication that lags behind nor a host that is ahead is about to be
    caught up."""
    same = all(isclose(last[clock], now[clock], rel_tol=1e-6, abs_tol=1e-12) for clock in now)
    return same and all(b >= a * (1 - 1e-6) - 1e-12 for a, b in zip(lagged, lag, strict=True))
