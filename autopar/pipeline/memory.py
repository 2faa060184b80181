"""Bytes on one device of each mesh of a pipeline, instruction by instruction."""

from jax.extend.core import Var

from autopar.pipeline.cut import Task
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.program import task_of
from simulator.memory import MemoryUse
from simulator.program import Free, Program, Recv, Run, Send


class MeshMemory:
    """Follows what lives on each mesh: the state, what microbatches add up to, values until they are freed, and temporaries."""

    def __init__(self, planned: PlannedPipeline) -> None:
        self.planned = planned
        self._tasks: dict[Task, MemoryUse] = {}

    def add_task(self, task: Task, used: MemoryUse) -> None:
        self._tasks[task] = used

    def peaks(self, program: Program) -> tuple[MemoryUse, ...]:
        """The memory of each mesh when it is fullest. Inputs are its arguments; all else that lives then is temporary."""
        return tuple(self._peak(mesh, program) for mesh in range(len(program.meshes)))

    def _peak(self, mesh: int, program: Program) -> MemoryUse:
        cut, names = self.planned.cut, self.planned.names
        mesh_of = self.planned.schedule.pipeline.mesh_of
        held: dict[str, int] = {}
        arguments = 0
        for i, stages in cut.input_stages.items():
            here = [stage for stage in stages if mesh_of(stage) == mesh]
            if here:
                size = self._bytes(here[0], cut.step.jaxpr.invars[i])
                arguments += size * (cut.step.num_micro_batches if i in cut.step.batch else 1)
        for task, totals in cut.totals.items():
            if mesh_of(task.stage) == mesh:
                held.update((names.of(each.sum, 0), self._bytes(task.stage, each.sum)) for each in totals)
        received = self._sizes(mesh, program)
        most = sum(held.values())
        for instruction in program.instructions[mesh]:
            match instruction:
                case Run():
                    task = task_of(instruction)
                    made = {names.of(v, instruction.micro_batch): self._bytes(task.stage, v) for v in cut.results[task]}
                    used = self._tasks.get(task, MemoryUse())
                    sums = sum(self._bytes(task.stage, each.sum) for each in cut.totals.get(task, ()))
                    new = sum(made.values()) - max(0, used.aliased - sums)  # sums grow where they are
                    most = max(most, sum(held.values()) + new + used.temporaries)
                    if task.phase != "U":  # what an update makes takes the place of what was there
                        held.update(made)
                case Recv(value):
                    held[value] = received.get(value, 0)
                case Free(values):
                    for value in values:
                        held.pop(value, None)
                case Send():
                    pass
        return MemoryUse(arguments=arguments, outputs=0, aliased=0, temporaries=most)

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
