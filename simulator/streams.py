"""The streams of one mesh, in which `simulator.engine` puts its work: when each is busy, and what it waits for.

Where computation and collectives slow each other (`Link.slowdown`), both go on at a part of their speed while they share a device, so
when a collective ends depends on what is computed beside it. It is known when the compute stream has come so far, or waits; once a
value is sent to another mesh, what is still under way goes on at full speed.

So faster hardware is never slower on one mesh, nor in pipelines whose tasks wait for the collectives that they start, as compiled ones do.
In other pipelines more of a collective may come before a send, and slow what is beside it, the earlier it starts: there faster hardware
takes at most `slowdown` times as long, as sharing never takes longer than that (all this for slowdowns up to 2, which `Link` asserts).
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isclose
from typing import assert_never

from simulator.costs import CostModel, collective_seconds, kernel_seconds
from simulator.memory import Level
from simulator.timeline import Category, Link, Span, Stream
from simulator.work import Body, Collective, Done, Groups, Kernel, Loop, Part, Start, on_devices


@dataclass(slots=True)
class Transfer:
    """A collective that is under way, or waits for its turn.

    Attributes:
        left: seconds that remain of it if nothing else goes on.
        start: when it began.
    """

    name: str
    category: Category
    link: Link
    task: str
    left: float
    slowdown: float
    start: float = inf

    def go_on(self, time: float, seconds: float) -> None:
        """Get so many seconds further, from `time` on."""
        self.start, self.left = min(self.start, time), self.left - seconds


@dataclass(slots=True)
class Streams:
    """The streams of one mesh: `compute`, `communication` and `host` say until when each is busy."""

    mesh: int
    devices: tuple[int, ...]
    costs: CostModel
    link_of: Callable[[Groups], Link]
    task: str = ""
    compute: float = 0.0
    communication: float = 0.0
    host: float = 0.0
    running: dict[str, tuple[float, Category]] = field(default_factory=dict)  # started, not waited for: when each ends
    under_way: deque[Transfer] = field(default_factory=deque)  # whose end is not known yet
    spans: list[Span] = field(default_factory=list)
    levels: list[tuple[float, Level]] = field(default_factory=list)
    num_levels: int = 0
    groups: dict[Groups, Groups] = field(default_factory=dict)
    links: dict[Groups, Link] = field(default_factory=dict)

    def dispatch(self, name: str, seconds: float) -> None:
        """Let the host hand over an instruction, for which the devices wait."""
        start, self.host = self.host, self.host + seconds
        self._record(name, "host", start, self.host, "dispatch")
        self.wait_until(self.host, name, "host")

    def play(self, body: Body) -> None:
        for op in body:
            match op:
                case Kernel():
                    start = self.compute
                    self._compute(kernel_seconds(self.costs, op, self.devices[0]))
                    self._record(op.name, "compute", start, self.compute, op.kind, part=op.part)
                case Start(collective):
                    self._start(collective)
                case Done(name):
                    while any(transfer.name == name for transfer in self.under_way):
                        self._finish()
                    if name not in self.running:
                        raise ValueError(f"task {self.task}: waits for collective {name!r}, which is not running")
                    end, kind = self.running.pop(name)
                    self.wait_until(end, name, "wait", kind)
                case Loop():
                    self._loop(op)
                case _:
                    assert_never(op)

    def communicate(self, name: str, seconds: float, category: Category, link: Link) -> Span:
        """Hand a transfer that disturbs nobody to the communication stream now."""
        self.settle()
        start = max(self.compute, self.communication)
        self.communication = start + seconds
        span = Span(name, self.mesh, "communication", start, self.communication, category, self.task, link=link)
        self.spans.append(span)
        return span

    def settle(self) -> None:
        """Let what is under way go on at full speed from now on."""
        while self.under_way:
            self._finish()

    def link(self, groups: Groups) -> Link:
        """What the devices of `groups` communicate over."""
        if groups not in self.links:
            self.links[groups] = self.link_of(groups)
        return self.links[groups]

    def record_levels(self, start: float, levels: tuple[tuple[Level, Level], ...]) -> None:
        """What the mesh holds from `start` on while its next instruction runs, and from now on after it."""
        during, after = levels[self.num_levels]
        self.levels += [(start, during), (self.compute, after)]
        self.num_levels += 1

    def wait_until(self, time: float, name: str, category: Category, awaited: Category | None = None) -> None:
        """Let the compute stream idle until `time`, while collectives go on."""
        if time > self.compute:
            while self.under_way and (begin := max(self.compute, self.communication)) < time:
                transfer = self.under_way[0]
                if begin + transfer.left > time:
                    transfer.go_on(begin, time - begin)
                    break
                self._finish()
            self._record(name, "compute", self.compute, time, category, awaited)
            self.compute = time

    def _start(self, collective: Collective) -> None:
        """Hand a collective to the communication stream now."""
        groups = self._global(collective)
        seconds = collective_seconds(self.costs, collective, groups)
        slowdown, link = self.costs.slowdown(groups), self.link(groups)
        if slowdown == 1 and not self.under_way:
            span = self.communicate(collective.name, seconds, collective.kind, link)
            self.running[collective.name] = span.end, collective.kind
        else:
            transfer = Transfer(collective.name, collective.kind, link, self.task, seconds, slowdown)
            self.under_way.append(transfer)

    def _compute(self, seconds: float) -> None:
        """Compute for so long, or longer where a collective goes on meanwhile."""
        while seconds and self.under_way:
            if self.communication > self.compute:  # what was sent before is still on its way
                alone = min(seconds, self.communication - self.compute)
                self.compute, seconds = self.compute + alone, seconds - alone
                continue
            transfer = self.under_way[0]
            together = min(seconds, transfer.left)
            transfer.go_on(self.compute, together)
            self.compute, seconds = self.compute + together * transfer.slowdown, seconds - together
            if not transfer.left:
                self._finish()
        self.compute += seconds

    def _finish(self) -> None:
        """Let the first of what is under way go on alone until it ends."""
        each = self.under_way.popleft()
        start = max(self.compute, self.communication)
        self.communication = end = start + each.left
        each.go_on(start, each.left)
        self.running[each.name] = end, each.category
        self.spans.append(
            Span(each.name, self.mesh, "communication", each.start, end, each.category, each.task, link=each.link)
        )

    def _loop(self, loop: Loop) -> None:
        """Play iterations until they repeat one another, then skip ahead."""
        last = None
        for iteration in range(1, loop.count + 1):
            first_span, compute, communication = len(self.spans), self.compute, self.communication
            running = dict(self.running)
            self.play(loop.body)
            steps = self.compute - compute, self.communication - communication
            backlog = max(0.0, self.communication - self.compute)
            if self.under_way:
                last = None
                continue
            if last is not None and _steady(last, (*steps, backlog)):
                started = {name for name, end in self.running.items() if running.get(name) != end}
                self._skip(loop.count - iteration, *steps, self.spans[first_span:], started)
                return
            last = (*steps, backlog)

    def _skip(self, count: int, compute: float, communication: float, pattern: list[Span], started: set[str]) -> None:
        """Add `count` more iterations that advance the streams by `compute` and `communication` seconds, as `pattern` did."""
        if not count:
            return
        ends: dict[Stream, float] = {
            "compute": self.compute + count * compute,
            "communication": self.communication + count * communication,
        }
        begins: dict[Stream, float] = {"compute": self.compute, "communication": self.communication}
        busy: defaultdict[tuple[Stream, Category, Category | None, Link | None, Part], float] = defaultdict(float)
        for span in pattern:
            busy[span.stream, span.category, span.awaited, span.link, span.part] += count * span.seconds
        for (stream, category, awaited, link, part), seconds in busy.items():
            name, begin, end = f"{count} x {category}", begins[stream], ends[stream]
            span = Span(name, self.mesh, stream, begin, end, category, self.task, seconds, awaited, link, part)
            self.spans.append(span)
        self.compute, self.communication = ends["compute"], ends["communication"]
        for name in started:
            end, kind = self.running[name]
            self.running[name] = end + count * communication, kind

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
        part: Part = "",
    ) -> None:
        self.spans.append(Span(name, self.mesh, stream, start, end, category, self.task, awaited=awaited, part=part))


def _steady(last: tuple[float, float, float], now: tuple[float, float, float]) -> bool:
    """Both streams advanced as in the iteration before, and communication that lags behind is not about to be caught up."""
    same = all(isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(last[:2], now[:2], strict=True))
    return same and now[2] >= last[2] * (1 - 1e-6) - 1e-12
