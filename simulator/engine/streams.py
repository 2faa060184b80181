"""The streams of one mesh in the event engine: `stream_rules` over seconds, with a record of spans.

It adds what only a timeline needs: the host that launches instructions, the spans of each stream,
the levels of memory, and loops whose iterations are skipped once they repeat each other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isclose
from typing import Any, Literal, assert_never

from simulator.costs.cost_model import CostModel, collective_seconds, kernel_seconds
from simulator.engine.stream_rules import MeshStreams, Transfer
from simulator.memory import Level
from simulator.spans import LINKS, Category, Link, Span, Stream
from simulator.work import (
    Collective,
    Done,
    Groups,
    Kernel,
    Loop,
    Op,
    OpList,
    Start,
    TrainingPhase,
    on_devices,
)

type _Resource = Literal["compute", "host"] | Link
type _Details = tuple[Category | None, Link | None, TrainingPhase, str]
"""What is awaited, the link, the part of the training step and the mesh axes of a span."""


@dataclass(slots=True)
class _CollectiveTransfer(Transfer[float]):
    """A collective, and the task that started it."""

    collective: Collective
    task: str


class RecordedStreams(MeshStreams[float]):
    """The streams of one mesh and of its host, with a record of what happens.

    Attributes:
        mesh: its number.
        devices: ids of its devices in the cluster.
        task: the instruction that is running, as it prints.
        host: until when the host is busy.
        launch: seconds of the host for each kernel and collective. None of them starts before it is
            launched.
        spans: what happened so far.
        levels: memory of one device, each level with the time at which it begins.
    """

    def __init__(self, mesh: int, devices: tuple[int, ...], costs: CostModel) -> None:
        super().__init__(float)
        self.mesh = mesh
        self.devices = devices
        self.task = ""
        self.host = 0.0
        self.launch = 0.0
        self.spans: list[Span] = []
        self.levels: list[tuple[float, Level]] = []
        self._costs = costs
        self._num_instructions = 0
        self._task_levels: list[tuple[float, Level]] = []
        self._groups: dict[Groups, Groups] = {}
        self.link = cache(costs.link)

    @property
    def end(self) -> float:
        """When everything that was issued so far has ended."""
        return max(self.compute, *self.free.values())

    def dispatch(self, name: str, seconds: float) -> None:
        """Let the host issue an instruction. The devices wait for it."""
        start = self.host
        self.host += seconds
        self.record_host(name, start)
        self.idle_until(self.host, name, "host")

    def record_host(self, name: str, start: float) -> None:
        """Record that the host has been busy since `start`, if it has."""
        if self.host > start:
            self._record(name, "host", start, self.host, "dispatch")

    def play_task(self, body: OpList, levels: Sequence[Level]) -> None:
        """Run a task, and record its memory over time.

        Args:
            body: its ops.
            levels: the memory while each op runs; empty if the task has the one level that
                `record_levels` records.

        Raises:
            ValueError: the task waits for a collective that is not running.
        """
        if not levels:
            self.play_body(body)
            return
        last: Level | None = self._task_levels[-1][1] if self._task_levels else None
        for op, level in zip(body, levels, strict=False):
            if level is not last and level != last:
                self._task_levels.append((self.compute, level))
                last = level
            self._play_op(op)

    def play_body(self, body: OpList) -> None:
        """Run ops one after the other.

        Raises:
            ValueError: the task waits for a collective that is not running.
        """
        for op in body:
            self._play_op(op)

    def _play_op(self, op: Op) -> None:
        """Play one op of a body, and record its span."""
        match op:
            case Kernel():
                self._launch(op.name)
                start = self.compute
                self.run(kernel_seconds(self._costs, op, self.devices[0]))
                self.spans.append(  # most spans are of kernels, and `_record` takes longer
                    Span(
                        op.name,
                        self.mesh,
                        "compute",
                        start,
                        self.compute,
                        op.kind,
                        self.task,
                        phase=op.phase,
                    )
                )
            case Start(collective):
                self._launch(collective.name)
                self._start(collective)
            case Done(name):
                transfer = self.finish_named(name)
                if transfer is None:
                    raise ValueError(
                        f"task {self.task}: waits for collective {name!r}, which is not running"
                    )
                assert isinstance(transfer, _CollectiveTransfer)
                self.idle_until(transfer.end, name, "wait", transfer.collective)
            case Loop():
                self._loop(op)
            case _:
                assert_never(op)

    def send(self, name: str, seconds: float, link: Link) -> Span:
        """Send a value that contends with nothing, and return the span of its transfer."""
        self.settle(link)
        start = self.occupy(link, seconds)
        return self._record(name, "communication", start, self.free[link], "send", link=link)

    def record_arrival(self, name: str, start: float, time: float) -> Span:
        """Record a value that was sent between hosts over shared NICs and arrives at `time`."""
        self.free["between hosts"] = time
        return self._record(
            name, "communication", start, time, "send", task=name, link="between hosts"
        )

    def finish_first(self, link: Link) -> Transfer[float]:
        """Let the first transfer on a link continue at full speed, and record it."""
        transfer = super().finish_first(link)
        assert isinstance(transfer, _CollectiveTransfer)
        assert transfer.start is not None
        self._record(
            transfer.name,
            "communication",
            transfer.start,
            transfer.end,
            transfer.collective.kind,
            task=transfer.task,
            link=link,
            axis=transfer.collective.axis,
        )
        return transfer

    def uses(self, link: Link, body: OpList) -> bool:
        """Return whether a body communicates over a link."""
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
        """Record the memory during the next instruction, from `start` on, and after it, from now.

        Args:
            start: when the instruction starts.
            levels: memory during and after each instruction of the mesh. An instruction whose
                memory is known for each of its ops has these levels instead.
        """
        during, after = levels[self._num_instructions]
        self.levels += self._task_levels or [(start, during)]
        self.levels.append((self.compute, after))
        self._num_instructions += 1
        self._task_levels = []

    def idle_until(
        self, time: float, name: str, category: Category, awaited: Collective | None = None
    ) -> None:
        """Let the compute stream idle until `time`, and record why."""
        if time > self.compute:
            start = self.compute
            self.wait_until(time)
            details = {"awaited": awaited.kind, "axis": awaited.axis} if awaited else {}
            self._record(name, "compute", start, time, category, **details)

    def _launch(self, name: str) -> None:
        if self.launch:
            self.host += self.launch
            self.idle_until(self.host, name, "host")

    def _start(self, collective: Collective) -> None:
        groups = self._global(collective)
        seconds = collective_seconds(self._costs, collective, groups)
        contention_factor = self._costs.contention_factor(groups)
        self.issue(
            _CollectiveTransfer(
                collective.name,
                self.link(groups),
                seconds,
                contention_factor,
                collective,
                self.task,
            )
        )

    def _loop(self, loop: Loop) -> None:
        """Play iterations until they repeat each other, then skip the others."""
        last = None
        for iteration in range(1, loop.count + 1):
            first_span = len(self.spans)
            before = self._times()
            timed = dict(self.timed)
            self.play_body(loop.body)
            if any(self.under_way.values()):
                last = None
                continue
            steps: dict[_Resource, float] = {
                resource: time - before[resource] for resource, time in self._times().items()
            }
            lags = [max(0.0, time - self.compute) for time in self.free.values()]
            lags.append(self.compute - self.host if self.launch else 0.0)
            if last is not None and _steady(*last, steps, lags):
                started = [
                    transfer
                    for name, transfer in self.timed.items()
                    if timed.get(name) is not transfer
                ]
                self._skip(loop.count - iteration, steps, self.spans[first_span:], started)
                return
            last = steps, lags

    def _times(self) -> dict[_Resource, float]:
        return {"compute": self.compute, "host": self.host, **self.free}

    def _skip(
        self,
        count: int,
        steps: dict[_Resource, float],
        pattern: list[Span],
        started: list[Transfer[float]],
    ) -> None:
        """Add `count` iterations; in each one the streams advance by `steps`.

        Args:
            count: number of iterations.
            steps: seconds by which an iteration advances each stream.
            pattern: spans of one iteration; spans of one category become one long span.
            started: transfers that an iteration starts and doesn't wait for.
        """
        if not count:
            return
        begins = self._times()
        busy: defaultdict[tuple[Stream, Category, _Details], float] = defaultdict(float)
        for span in pattern:
            details = span.awaited, span.link, span.phase, span.axis
            busy[span.stream, span.category, details] += count * span.seconds
        for (stream, category, details), seconds in busy.items():
            resource = details[1] or ("host" if stream == "host" else "compute")
            times = begins[resource], begins[resource] + count * steps[resource]
            name = f"{count} x {category}"
            self.spans.append(
                Span(name, self.mesh, stream, *times, category, self.task, seconds, *details)
            )
        self.compute += count * steps["compute"]
        self.host += count * steps["host"]
        for link in LINKS:
            self.free[link] += count * steps[link]
        for transfer in started:
            transfer.end += count * steps[transfer.link]

    def _global(self, collective: Collective) -> Groups:
        """Return the groups of a collective in ids of the cluster."""
        if collective.groups not in self._groups:
            self._groups[collective.groups] = on_devices(collective, self.devices)
        return self._groups[collective.groups]

    def _record(
        self,
        name: str,
        stream: Stream,
        start: float,
        end: float,
        category: Category,
        **details: Any,
    ) -> Span:
        details.setdefault("task", self.task)
        span = Span(name, self.mesh, stream, start, end, category, **details)
        self.spans.append(span)
        return span


def _steady(
    last_steps: dict[_Resource, float],
    last_lags: list[float],
    steps: dict[_Resource, float],
    lags: list[float],
) -> bool:
    """Return whether the iterations after this one advance the streams by the same steps.

    That holds if two iterations did, and neither a link that lags behind the compute stream nor a
    host that is ahead of it gets any closer to it.
    """
    return all(
        isclose(last_steps[resource], step, rel_tol=1e-6, abs_tol=1e-12)
        for resource, step in steps.items()
    ) and all(lag >= last * (1 - 1e-6) - 1e-12 for last, lag in zip(last_lags, lags, strict=True))
