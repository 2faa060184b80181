"""Puts clocks on a program: what every mesh computes, communicates and waits for, and when.

All devices of a mesh do the same at the same time, so a mesh has one compute stream, which takes operations in order, and one
communication stream, which takes what the compute stream hands it, in order. They meet where the compute stream waits. A host hands
the instructions to both. (`simulator.clock` finds the same makespan faster, and no timeline.)
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import isclose
from typing import assert_never

from simulator.cluster import Cluster
from simulator.costs import ClusterCosts, CostModel
from simulator.program import Free, Program, Recv, Run, Send, walk
from simulator.timeline import Category, Span, Stream, Timeline
from simulator.work import Body, Collective, Done, Groups, Kernel, Loop, Start, on_devices


def simulate(program: Program, cluster: Cluster, costs: CostModel | None = None, dispatch: float = 0.0) -> Timeline:
    """The timeline of one step of `program` on `cluster`, by default at the costs that `cluster` implies.

    A send moves `num_bytes` in equal parts from each device of its mesh to its partner in the other mesh. Gathers of what arrives are
    communication of the mesh that receives, which waits for them. `dispatch` are the seconds that the host of a mesh takes for each
    instruction; it runs ahead of the devices, which wait where it is late.

    Raises:
        DeadlockError: the meshes wait for one another.
        ValueError: a mesh has devices that the cluster lacks, or a task has no body.
    """
    costs = costs or ClusterCosts(cluster)
    for mesh, devices in enumerate(program.meshes):
        if not devices or max(devices) >= cluster.num_devices:
            raise ValueError(
                f"mesh {mesh} has devices {devices}; cluster {cluster.name!r} has devices 0 to {cluster.num_devices - 1}"
            )
    clocks = [_Clock(mesh, devices, costs) for mesh, devices in enumerate(program.meshes)]
    arrivals: dict[tuple[str, int, int], float] = {}
    for mesh, instruction in walk(program):
        clock = clocks[mesh]
        clock.task = str(instruction)
        if dispatch and not isinstance(instruction, Free):
            clock.dispatch(str(instruction), dispatch)
        match instruction:
            case Run():
                clock.play(program.body(instruction))
            case Send(value, to, num_bytes):
                pairs = program.pairs(mesh, to)
                seconds = costs.collective("permute", num_bytes / len(pairs), pairs)
                arrivals[value, mesh, to] = clock.communicate(str(instruction), seconds, "send")
            case Recv(value, source, gather):
                clock.wait_until(arrivals.pop((value, source, mesh)), str(instruction), "bubble")
                if gather is not None:
                    clock.play((Start(gather), Done(gather.name)))
            case Free():
                pass
            case _:
                assert_never(instruction)
    spans = tuple(span for clock in clocks for span in clock.spans)
    return Timeline(spans, program.meshes, program.memory)


@dataclass(slots=True)
class _Clock:
    """The streams of one mesh: `compute`, `communication` and `host` say until when each is busy."""

    mesh: int
    devices: tuple[int, ...]
    costs: CostModel
    task: str = ""
    compute: float = 0.0
    communication: float = 0.0
    host: float = 0.0
    running: dict[str, tuple[float, Category]] = field(default_factory=dict)  # started, not waited for: when each ends
    spans: list[Span] = field(default_factory=list)
    groups: dict[Groups, Groups] = field(default_factory=dict)

    def dispatch(self, name: str, seconds: float) -> None:
        """Let the host hand over an instruction, for which the devices wait."""
        start, self.host = self.host, self.host + seconds
        self._record(name, "host", start, self.host, "dispatch")
        self.wait_until(self.host, name, "host")

    def play(self, body: Body) -> None:
        for op in body:
            match op:
                case Kernel():
                    start, self.compute = self.compute, self.compute + self.costs.kernel(op)
                    self._record(op.name, "compute", start, self.compute, op.kind)
                case Start(collective):
                    seconds = self.costs.collective(collective.kind, collective.num_bytes, self._global(collective))
                    end = self.communicate(collective.name, seconds, collective.kind)
                    self.running[collective.name] = end, collective.kind
                case Done(name):
                    if name not in self.running:
                        raise ValueError(f"task {self.task}: waits for collective {name!r}, which is not running")
                    end, kind = self.running.pop(name)
                    self.wait_until(end, name, "wait", kind)
                case Loop():
                    self._loop(op)
                case _:
                    assert_never(op)

    def communicate(self, name: str, seconds: float, category: Category) -> float:
        """Hand a transfer to the communication stream now; returns when it ends."""
        start = max(self.compute, self.communication)
        self.communication = start + seconds
        self._record(name, "communication", start, self.communication, category)
        return self.communication

    def wait_until(self, time: float, name: str, category: Category, awaited: Category | None = None) -> None:
        """Let the compute stream idle until `time`."""
        if time > self.compute:
            self._record(name, "compute", self.compute, time, category, awaited)
            self.compute = time

    def _loop(self, loop: Loop) -> None:
        """Play iterations until they repeat one another, then skip ahead."""
        last = None
        for iteration in range(1, loop.count + 1):
            first_span, compute, communication = len(self.spans), self.compute, self.communication
            running = dict(self.running)
            self.play(loop.body)
            steps = self.compute - compute, self.communication - communication
            backlog = max(0.0, self.communication - self.compute)
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
        busy: defaultdict[tuple[Stream, Category, Category | None], float] = defaultdict(float)
        for span in pattern:
            busy[span.stream, span.category, span.awaited] += count * span.seconds
        for (stream, category, awaited), seconds in busy.items():
            name, begin, end = f"{count} x {category}", begins[stream], ends[stream]
            self.spans.append(Span(name, self.mesh, stream, begin, end, category, self.task, seconds, awaited))
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
        self, name: str, stream: Stream, start: float, end: float, category: Category, awaited: Category | None = None
    ) -> None:
        self.spans.append(Span(name, self.mesh, stream, start, end, category, self.task, awaited=awaited))


def _steady(last: tuple[float, float, float], now: tuple[float, float, float]) -> bool:
    """Both streams advanced as in the iteration before, and communication that lags behind is not about to be caught up."""
    same = all(isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(last[:2], now[:2], strict=True))
    return same and now[2] >= last[2] * (1 - 1e-6) - 1e-12
