"""Clock of hosts that are processes on one machine and share its cores: virtual CPU devices that stand in for a cluster.

Such a process carries out one instruction after the other, those of all its meshes in the order of `walk`, and waits for each to end.
What is under way at the same time shares the cores of the machine, whichever host it is of: up to `Processes.concurrent_instructions` instructions go
on at full speed, more of them each at an equal part of it (processor sharing; Kleinrock, Queueing Systems II, 1976, chapter 4).
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
"""A value, its mesh, and the one it is for."""


@dataclass(slots=True)
class _Process:
    """One host: what it has to do, and how many seconds of the first of it are left; None: not begun."""

    todo: deque[tuple[int, Instruction]] = field(default_factory=deque)
    left: float | None = None
    begun: float = 0.0
    idle_since: float = 0.0


def simulate_processes(
    program: Program, cluster: Cluster, seconds: Mapping[str, float], costs: CostModel | None = None
) -> Timeline:
    """The timeline of one step of `program` where the hosts of `cluster` are processes of one machine.

    A mesh that spans hosts is carried out in equal parts by each of them. A value is on its way while its receiver fetches it.

    Args:
        seconds: of each task (`Run.task`), running by itself.
        costs: of transfers; those that `cluster` implies by default.

    Raises:
        DeadlockError: the meshes wait for one another.
        ValueError: `cluster` says nothing of processes, or `seconds` nothing of a task.
    """
    clock = _Clock(program, cluster, seconds, costs or costs_of(cluster))
    while clock.advance():
        pass
    return Timeline(tuple(clock.spans), program.meshes, program.memory, tuple(clock.arrows))


class _Clock:
    def __init__(
        self, program: Program, cluster: Cluster, seconds: Mapping[str, float], costs: CostModel
    ) -> None:
        if cluster.processes is None:
            raise ValueError(
                f"cluster {cluster.name!r} doesn't say what its hosts cost as processes of one machine; give its file a section"
                f" processes with {', '.join(Processes.model_fields)}, or simulate it as hosts of their own (simulator.simulate)"
            )
        self._program, self._seconds, self._costs, self._cluster = program, seconds, costs, cluster
        self._host: Processes = cluster.processes
        self._of_mesh = [sorted(set(map(cluster.host_of, devices))) for devices in program.meshes]
        self._processes = {host: _Process() for hosts in self._of_mesh for host in hosts}
        for mesh, instruction in walk(program):
            for host in self._of_mesh[mesh]:
                if not isinstance(instruction, Free):
                    self._processes[host].todo.append((mesh, instruction))
        self._num_bytes = {
            (each.value, mesh, each.to): each.num_bytes
            for mesh, row in enumerate(program.instructions)
            for each in row
            if isinstance(each, Send)
        }
        self._sent: Counter[_Value] = Counter()
        self._time, self.spans, self.arrows = self._host.step_us * 1e-6, list[Span](), list[Arrow]()
        for process in self._processes.values():
            process.idle_since = self._time
        if self._time:
            self.spans += [
                Span("step", mesh, "host", 0.0, self._time, "dispatch")
                for mesh in range(len(program.meshes))
            ]

    def advance(self) -> bool:
        """Go on until an instruction ends; False if there is none left."""
        for process in self._processes.values():
            if process.left is None and process.todo and self._is_ready(*process.todo[0]):
                process.left, process.begun = self._work(*process.todo[0]), self._time
        busy = [process for process in self._processes.values() if process.left is not None]
        if not busy:
            assert not any(
                process.todo for process in self._processes.values()
            )  # else `walk` had found a deadlock
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
            self._of_mesh[instruction.source]
        )

    def _work(self, mesh: int, instruction: Instruction) -> float:
        """Seconds of an instruction that has the machine to itself, the part that each host of the mesh does."""
        share = 1 / len(self._of_mesh[mesh])
        match instruction:
            case Run():
                if instruction.task not in self._seconds:
                    raise ValueError(
                        f"task {instruction.task} has no seconds; they are given of: {', '.join(sorted(self._seconds))}"
                    )
                return share * (self._seconds[instruction.task] + self._host.task_us * 1e-6)
            case Recv(value, source, gather):
                pairs = self._program.pairs(source, mesh)
                num_bytes = self._num_bytes[value, source, mesh]
                found = self._costs.collective("collective_permute", num_bytes / len(pairs), pairs)
                if gather is not None:
                    groups = on_devices(gather, self._program.meshes[mesh])
                    found += self._costs.collective(gather.kind, gather.num_bytes, groups)
                return share * found
            case Send() | Free():
                return 0.0
            case _:
                assert_never(instruction)

    def _end(self, process: _Process) -> None:
        mesh, instruction = process.todo.popleft()
        name, begun = str(instruction), process.begun
        match instruction:
            case Run():
                self.spans.append(Span(name, mesh, "compute", begun, self._time, "task", name))
            case Send(value, to):
                self._sent[value, mesh, to] += 1
            case Recv(value, source):
                if begun > process.idle_since:
                    self.spans.append(
                        Span(name, mesh, "compute", process.idle_since, begun, "bubble")
                    )
                hosts = (*self._of_mesh[source], *self._of_mesh[mesh])
                link: Link = "between hosts" if len(set(hosts)) > 1 else "within hosts"
                self.spans.append(
                    Span(name, mesh, "communication", begun, self._time, "send", link=link)
                )
                self.arrows.append(Arrow(value, source, begun, mesh, self._time))
            case Free():
                pass
            case _:
                assert_never(instruction)
        process.left, process.idle_since = None, self._time
