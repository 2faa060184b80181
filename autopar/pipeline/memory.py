"""Bytes on one device of each mesh of a pipeline, instruction by instruction, by what they hold."""

from collections.abc import Iterable, Iterator, Mapping

from jax.extend.core import Var

from autopar.pipeline.cut import Task
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.program import task_of
from simulator.memory import Level, MemoryUse, Role, added, apportioned
from simulator.program import Free, Program, Recv, Run, Send

type Levels = tuple[tuple[tuple[Level, Level], ...], ...]
"""For each mesh what it holds while each instruction runs, and after it, arguments included: `simulator.program.Program.levels`."""


class MeshMemory:
    """Follows what lives on each mesh: the state, what microbatches add up to, values until they are freed, and temporaries."""

    def __init__(self, planned: PlannedPipeline) -> None:
        self.planned = planned
        self._tasks: dict[Task, tuple[MemoryUse, Mapping[Role, int]]] = {}

    def add_task(self, task: Task, used: MemoryUse, temporaries: Mapping[Role, float] | None = None) -> None:
        """What a task needs while it runs, and what its temporaries are, if that is known."""
        self._tasks[task] = used, apportioned(temporaries or {}, used.temporaries, "temporaries")

    def peaks(self, levels: Levels) -> tuple[MemoryUse, ...]:
        """The memory of each mesh when it is fullest. Inputs are its arguments; all else that lives then is temporary."""
        return tuple(self._peak(mesh, [during for during, _ in each]) for mesh, each in enumerate(levels))

    def levels(self, program: Program) -> Levels:
        """What lives on each mesh, instruction by instruction."""
        return tuple(tuple(self._held(mesh, program)) for mesh in range(len(program.meshes)))

    def _peak(self, mesh: int, levels: Iterable[Level]) -> MemoryUse:
        fixed = self._arguments(mesh)
        arguments = sum(fixed.values())
        most = max(levels, key=lambda level: sum(level.values()), default=fixed)
        return MemoryUse(arguments, temporaries=sum(most.values()) - arguments, roles=most)

    def _arguments(self, mesh: int) -> Level:
        cut, mesh_of = self.planned.cut, self.planned.schedule.pipeline.mesh_of
        arguments: dict[Role, int] = {}
        for i, stages in cut.input_stages.items():
            here = [stage for stage in stages if mesh_of(stage) == mesh]
            if here:
                var = cut.step.jaxpr.invars[i]
                size = self._bytes(here[0], var) * (cut.step.num_micro_batches if i in cut.step.batch else 1)
                arguments = added(arguments, {self.planned.values[here[0]].roles.get(var, "inputs"): size})
        return arguments

    def _held(self, mesh: int, program: Program) -> Iterator[tuple[Level, Level]]:
        """What lives on a mesh while each instruction runs, and after it."""
        cut, names = self.planned.cut, self.planned.names
        mesh_of = self.planned.schedule.pipeline.mesh_of
        held: dict[str, tuple[Role, int]] = {}
        for task, totals in cut.totals.items():
            if mesh_of(task.stage) == mesh:
                held.update(
                    (names.of(each.sum, 0), ("gradients", self._bytes(task.stage, each.sum))) for each in totals
                )
        received = self._received(mesh, program)
        fixed = self._arguments(mesh)
        now = _together(fixed, held)
        for instruction in program.instructions[mesh]:
            before = during = now
            match instruction:
                case Run():
                    task = task_of(instruction)
                    role = _role_of(task)
                    made = {
                        names.of(v, instruction.micro_batch): (role, self._bytes(task.stage, v))
                        for v in cut.results[task]
                    }
                    used, temporaries = self._tasks.get(task, (MemoryUse(), {}))
                    sums = sum(self._bytes(task.stage, each.sum) for each in cut.totals.get(task, ()))
                    written_over = max(0, used.aliased - sums)  # sums grow where they are
                    new = sum(size for _, size in made.values()) - written_over
                    during = added(before, {role: new}, temporaries)
                    if task.phase != "U":  # what an update makes takes the place of what was there
                        held.update(made)
                        now = added(before, {role: new})
                case Recv(value):
                    held[value] = received.get(value, ("activations", 0))
                    during = now = added(before, {held[value][0]: held[value][1]})
                case Free(values):
                    for value in values:
                        held.pop(value, None)
                    now = _together(fixed, held)
                case Send():
                    pass
            yield during, now

    def _received(self, mesh: int, program: Program) -> dict[str, tuple[Role, int]]:
        """What every value that the tasks of a mesh read is, and its bytes."""
        cut = self.planned.cut
        return {
            self.planned.names.of(var, run.micro_batch): (
                _role_of(cut.made_by[var])
                if var in cut.made_by
                else self.planned.values[run.stage].roles.get(var, "inputs"),
                self._bytes(run.stage, var),
            )
            for run in program.instructions[mesh]
            if isinstance(run, Run)
            for var in cut.reads[task_of(run)]
        }

    def _bytes(self, stage: int, var: Var) -> int:
        return self.planned.values[stage].device_bytes(var)


def _role_of(task: Task) -> Role:
    """What the results of a task are: gradients of activations come and go."""
    return "activations" if task.phase == "F" else "outputs" if task.phase == "U" else "temporaries"


def _together(fixed: Level, held: Mapping[str, tuple[Role, int]]) -> Level:
    found = dict(fixed)
    for role, size in held.values():
        found[role] = found.get(role, 0) + size
    return found
