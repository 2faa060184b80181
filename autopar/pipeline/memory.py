"""Bytes on one device of each mesh of a pipeline, instruction by instruction."""

from collections.abc import Iterator, Sequence

from jax.extend.core import Var

from autopar.pipeline.cut import Task
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.program import task_of
from simulator.memory import MemoryUse
from simulator.program import Free, Program, Recv, Run, Send

type Levels = tuple[tuple[tuple[int, int], ...], ...]
"""For each mesh the bytes while each instruction runs, and after it, arguments included: `simulator.program.Program.levels`."""


class MeshMemory:
    """Follows what lives on each mesh: the state, what microbatches add up to, values until they are freed, and temporaries."""

    def __init__(self, planned: PlannedPipeline) -> None:
        self.planned = planned
        self._tasks: dict[Task, MemoryUse] = {}

    def add_task(self, task: Task, used: MemoryUse) -> None:
        self._tasks[task] = used

    def peaks(self, levels: Levels) -> tuple[MemoryUse, ...]:
        """The memory of each mesh when it is fullest. Inputs are its arguments; all else that lives then is temporary."""
        return tuple(self._peak(mesh, each) for mesh, each in enumerate(levels))

    def levels(self, program: Program) -> Levels:
        """What lives on each mesh, instruction by instruction."""
        meshes = range(len(program.meshes))
        fixed = [self._arguments(mesh) for mesh in meshes]
        return tuple(
            tuple((fixed[mesh] + during, fixed[mesh] + after) for during, after in self._held(mesh, program))
            for mesh in meshes
        )

    def _peak(self, mesh: int, levels: Sequence[tuple[int, int]]) -> MemoryUse:
        fixed = self._arguments(mesh)
        most = max((during for during, _ in levels), default=fixed)
        return MemoryUse(arguments=fixed, outputs=0, aliased=0, temporaries=most - fixed)

    def _arguments(self, mesh: int) -> int:
        cut, mesh_of = self.planned.cut, self.planned.schedule.pipeline.mesh_of
        arguments = 0
        for i, stages in cut.input_stages.items():
            here = [stage for stage in stages if mesh_of(stage) == mesh]
            if here:
                size = self._bytes(here[0], cut.step.jaxpr.invars[i])
                arguments += size * (cut.step.num_micro_batches if i in cut.step.batch else 1)
        return arguments

    def _held(self, mesh: int, program: Program) -> Iterator[tuple[int, int]]:
        """What lives on a mesh beside the arguments while each instruction runs, and after it."""
        cut, names = self.planned.cut, self.planned.names
        mesh_of = self.planned.schedule.pipeline.mesh_of
        held: dict[str, int] = {}
        for task, totals in cut.totals.items():
            if mesh_of(task.stage) == mesh:
                held.update((names.of(each.sum, 0), self._bytes(task.stage, each.sum)) for each in totals)
        received = self._sizes(mesh, program)
        now = sum(held.values())
        for instruction in program.instructions[mesh]:
            match instruction:
                case Run():
                    task = task_of(instruction)
                    made = {names.of(v, instruction.micro_batch): self._bytes(task.stage, v) for v in cut.results[task]}
                    used = self._tasks.get(task, MemoryUse())
                    sums = sum(self._bytes(task.stage, each.sum) for each in cut.totals.get(task, ()))
                    before = sum(held.values())
                    new = sum(made.values()) - max(0, used.aliased - sums)  # sums grow where they are
                    during = before + new + used.temporaries
                    if task.phase != "U":  # what an update makes takes the place of what was there
                        held.update(made)
                    now = before + new if task.phase != "U" else before
                case Recv(value):
                    held[value] = received.get(value, 0)
                    now += held[value]
                    during = now
                case Free(values):
                    during = now
                    for value in values:
                        held.pop(value, None)
                    now = sum(held.values())
                case Send():
                    during = now
            yield during, now

    def _sizes(self, mesh: int, program: Program) -> dict[str, int]:
        """Bytes of every value that the tasks of a mesh read."""
        return {
            self.planned.names.of(var, run.micro_batch): self._bytes(run.stage, var)
            for run in program.instructions[mesh]
            if isinstance(run, Run)
            for var in self.planned.cut.reads[task_of(run)]
        }

    def _bytes(self, stage: int, var: Var) -> int:
        return self.planned.values[stage].device_bytes(var)
