"""Simulation of hosts that are processes of one machine and share its CPU cores.

Such processes, with virtual CPU devices, stand in for a cluster. A process carries out the
instructions of all its meshes one after the other, in the order of `walk`. Instructions that run at
the same time share the cores, whichever process they belong to. Up to
`Processes.concurrent_instructions` of them run at full speed; more share that speed equally
(processor sharing; Kleinrock, Queueing Systems II, 1976, chapter 4).
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from simulator.costs.cost_model import CostModel, costs_of
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster, Processes
from simulator.program import Free, Instruction, Program, Recv, Run, Send, walk
from simulator.spans import Arrow, Link, Span
from simulator.work import on_devices

type _Value = tuple[str, int, int]
"""A value, the mesh that sends it and the mesh that receives it."""


@dataclass(slots=True)
class _Process:
    """One host.

    Attributes:
        todo: the instructions that remain, each with its mesh.
        left: seconds that remain of the first instruction; None if it has not started.
        start: when the first instruction started.
        idle_since: when the instruction before it ended.
    """

    todo: deque[tuple[int, Instruction]] = field(default_factory=deque)
    left: float | None = None
    start: float = 0.0
    idle_since: float = 0.0


def simulate_processes(
    program: Program, cluster: Cluster, seconds: Mapping[str, float], costs: CostModel | None = None
) -> Timeline:
    """Return the timeline of one step on hosts that are processes of one machine.

    Hosts of one mesh carry out equal parts of its instructions. A value is on its way while its
    receiver fetches it.

    Args:
        program: what runs.
        cluster: the cluster, with `processes`.
        seconds: for each task (`Run.task`), its seconds if nothing else runs.
        costs: seconds of transfers; by default those of `cluster`.

    Raises:
        DeadlockError: the meshes wait for one another.
        ValueError: `cluster` has no `processes`, or `seconds` lacks a task.
    """
    machine = _Machine(program, cluster, seconds, costs or costs_of(cluster))
    while machine.advance():
        pass
    return Timeline(tuple(machine.spans), program.meshes, program.memory, tuple(machine.arrows))


class _Machine:
    """The processes of all hosts, which share the cores of one machine."""

    def __init__(
        self, program: Program, cluster: Cluster, seconds: Mapping[str, float], costs: CostModel
    ) -> None:
        if cluster.processes is None:
            raise ValueError(
                f"cluster {cluster.name!r} doesn't say what its hosts cost as processes of one"
                " machine; give its file a section processes with"
                f" {', '.join(Processes.model_fields)}, or simulate it as hosts of their own"
                " (simulator.simulate)"
            )
        self._program = program
        self._seconds = seconds
        self._costs = costs
        self._host: Processes = cluster.processes
        self._hosts = [sorted(set(map(cluster.host_of, devices))) for devices in program.meshes]
        self._processes = {host: _Process() for hosts in self._hosts for host in hosts}
        for mesh, instruction in walk(program):
            for host in self._hosts[mesh]:
                if not isinstance(instruction, Free):
                    self._processes[host].todo.append((mesh, instruction))
        self._num_bytes = {
            (op.value, mesh, op.to): op.num_bytes
            for mesh, row in enumerate(program.instructions)
            for op in row
            if isinstance(op, Send)
        }
        self._sent: Counter[_Value] = Counter()
        self._time = self._host.step_us * 1e-6
        self.spans: list[Span] = []
        self.arrows: list[Arrow] = []
        for process in self._processes.values():
            process.idle_since = self._time
        if self._time:
            self.spans += [
                Span("step", mesh, "host", 0.0, self._time, "dispatch")
                for mesh in range(len(program.meshes))
            ]

    def advance(self) -> bool:
        """Advance until an instruction ends; return False if none is left."""
        for process in self._processes.values():
            if process.left is None and process.todo and self._is_ready(*process.todo[0]):
                process.left = self._full_speed_seconds(*process.todo[0])
                process.start = self._time
        busy = [process for process in self._processes.values() if process.left is not None]
        if not busy:
            # `walk` raises an error for a deadlock.
            assert not any(process.todo for process in self._processes.values())
            return False
        rate = min(1.0, self._host.concurrent_instructions / len(busy))
        least = min(process.left for process in busy if process.left is not None)
        self._time += least / rate
        for process in busy:
            assert process.left is not None
            process.left -= least
            if process.left <= 1e-12:
                self._end(process)
        return True

    def _is_ready(self, mesh: int, instruction: Instruction) -> bool:
        if not isinstance(instruction, Recv):
            return True
        return self._sent[instruction.value, instruction.source, mesh] == len(
            self._hosts[instruction.source]
        )

    def _full_speed_seconds(self, mesh: int, instruction: Instruction) -> float:
        """Return the seconds of one host's part of an instruction, if nothing else runs."""
        share = 1 / len(self._hosts[mesh])
        match instruction:
            case Run():
                if instruction.task not in self._seconds:
                    raise ValueError(
                        f"task {instruction.task} has no seconds;"
                        f" they are given of: {', '.join(sorted(self._seconds))}"
                    )
                return share * (self._seconds[instruction.task] + self._host.task_us * 1e-6)
            case Recv(value, source, gather):
                pairs = self._program.pairs(source, mesh)
                num_bytes = self._num_bytes[value, source, mesh]
                num_bytes /= len(pairs)
                seconds = self._costs.collective("collective_permute", num_bytes, pairs)
                if gather is not None:
                    groups = on_devices(gather, self._program.meshes[mesh])
                    seconds += self._costs.collective(gather.kind, gather.num_bytes, groups)
                return share * seconds
            case Send() | Free():
                return 0.0
            case _:
                assert_never(instruction)

    def _end(self, process: _Process) -> None:
        """End the instruction that a process runs, and record its spans."""
        mesh, instruction = process.todo.popleft()
        name = str(instruction)
        start = process.start
        match instruction:
            case Run():
                self.spans.append(Span(name, mesh, "compute", start, self._time, "task", name))
            case Send(value, to):
                self._sent[value, mesh, to] += 1
            case Recv(value, source):
                if start > process.idle_since:
                    self.spans.append(
                        Span(name, mesh, "compute", process.idle_since, start, "bubble")
                    )
                hosts = (*self._hosts[source], *self._hosts[mesh])
                link: Link = "between hosts" if len(set(hosts)) > 1 else "within hosts"
                self.spans.append(
                    Span(name, mesh, "communication", start, self._time, "send", link=link)
                )
                self.arrows.append(Arrow(value, source, start, mesh, self._time))
            case Free():
                pass
            case _:
                assert_never(instruction)
        process.left = None
        process.idle_since = self._time
