"""Bytes on one device of each mesh of a plan, instruction by instruction, by what they hold."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Var

from autopar.lowering.instructions import micro_batch_of, task_of
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from simulator.memory import Level, MemoryUse, Role, added, apportioned, with_roles
from simulator.program import Free, Program, Recv, Run, Send

type Levels = tuple[tuple[tuple[Level, Level], ...], ...]
"""For each mesh what it holds while each instruction runs, and after it, arguments included: `simulator.program.Program.levels`."""


class _Value(NamedTuple):
    """A value that lives on a mesh: bytes of a device's shard."""

    role: Role
    num_bytes: int


class MeshMemory:
    """Follows what lives on each mesh: the state, what microbatches add up to, values until they are freed, and temporaries."""

    def __init__(self, planned: PlannedStep) -> None:
        self.planned = planned
        self._tasks: dict[Task, tuple[MemoryUse, Mapping[Role, int]]] = {}

    def add_task(
        self, task: Task, used: MemoryUse, temporaries: Mapping[Role, float] | None = None
    ) -> None:
        """Add what a task needs while it runs, and what its temporaries are, if that is known."""
        self._tasks[task] = used, apportioned(temporaries or {}, used.temporaries, "temporaries")

    def peaks(self, levels: Levels) -> tuple[MemoryUse, ...]:
        """Return the memory of each mesh when it is fullest. Inputs are its arguments; all else that lives then is temporary.

        The memory of a step that is one program is that program's.
        """
        if self.planned.partition.is_whole_step:
            return (self._whole_step(),)
        return tuple(
            self._peak(mesh, [during for during, _ in each]) for mesh, each in enumerate(levels)
        )

    def levels(self, program: Program) -> Levels:
        """Return what lives on each mesh, instruction by instruction."""
        return tuple(tuple(self._held(mesh, program)) for mesh in range(len(program.meshes)))

    def _whole_step(self) -> MemoryUse:
        """The memory of the one program of a step that is not cut."""
        used, temporaries = self._tasks.get(WHOLE_STEP_TASK, (MemoryUse(), {}))
        return used if used.roles else with_roles(used, self._arguments(0), temporaries)

    def _peak(self, mesh: int, levels: Iterable[Level]) -> MemoryUse:
        fixed = self._arguments(mesh)
        arguments = sum(fixed.values())
        most = max(levels, key=lambda level: sum(level.values()), default=fixed)
        return MemoryUse(arguments, temporaries=sum(most.values()) - arguments, roles=most)

    def _arguments(self, mesh: int) -> Level:
        partition, mesh_of = self.planned.partition, self.planned.schedule.mesh_of
        arguments: dict[Role, int] = {}
        for i, stages in partition.input_stages.items():
            here = [stage for stage in stages if mesh_of(stage) == mesh]
            if here:
                var = partition.step.jaxpr.invars[i]
                size = self._bytes(here[0], var) * partition.input_microbatches(i)
                arguments = added(arguments, {self._role(here[0], var): size})
        return arguments

    def _held(self, mesh: int, program: Program) -> Iterator[tuple[Level, Level]]:
        """What lives on a mesh while each instruction runs, and after it."""
        fixed, held, read = self._arguments(mesh), self._sums(mesh), self._read(mesh, program)
        now = _together(fixed, held)
        for instruction in program.instructions[mesh]:
            before = during = now
            match instruction:
                case Run(phase="S"):
                    during = self._whole_step().roles
                case Run():
                    made = self._made(instruction)
                    now, temporaries = self._grown(before, task_of(instruction), made)
                    during = added(now, temporaries)
                    if (
                        instruction.phase == "U"
                    ):  # what an update makes takes the place of what was there
                        now = before
                    else:
                        held.update(made)
                case Recv(value):
                    held[value] = read.get(value, _Value("activations", 0))
                    during = now = added(before, {held[value].role: held[value].num_bytes})
                case Free(values):
                    for value in values:
                        held.pop(value, None)
                    now = _together(fixed, held)
                case Send():
                    pass
            yield during, now

    def _grown(
        self, before: Level, task: Task, made: Mapping[str, _Value]
    ) -> tuple[Level, Mapping[Role, int]]:
        """What lives after a task has run, and what it needs on top of that while it runs."""
        used, temporaries = self._tasks.get(task, (MemoryUse(), {}))
        sums = sum(
            self._bytes(task.stage, each.sum)
            for each in self.planned.partition.totals.get(task, ())
        )
        written_over = max(0, used.aliased - sums)  # sums grow where they are
        new = sum(value.num_bytes for value in made.values()) - written_over
        return added(before, {_role_of(task): new}), temporaries

    def _sums(self, mesh: int) -> dict[str, _Value]:
        """What microbatches add up to."""
        mesh_of = self.planned.schedule.mesh_of
        return {
            self.planned.names.of(each.sum, 0): _Value(
                "gradients", self._bytes(task.stage, each.sum)
            )
            for task, totals in self.planned.partition.totals.items()
            if mesh_of(task.stage) == mesh
            for each in totals
        }

    def _made(self, run: Run) -> dict[str, _Value]:
        """What a task hands on."""
        return {
            self.planned.names.of(var, micro_batch_of(run)): _Value(
                _role_of(task_of(run)), self._bytes(run.stage, var)
            )
            for var in self.planned.partition.results[task_of(run)]
        }

    def _read(self, mesh: int, program: Program) -> dict[str, _Value]:
        """What the tasks of a mesh read."""
        return {
            self.planned.names.of(var, micro_batch_of(run)): _Value(
                self._role(run.stage, var), self._bytes(run.stage, var)
            )
            for run in program.instructions[mesh]
            if isinstance(run, Run)
            for var in self.planned.partition.reads[task_of(run)]
        }

    def _role(self, stage: int, var: Var) -> Role:
        maker = self.planned.partition.producers.get(var)
        return _role_of(maker) if maker else self.planned.values[stage].roles.get(var, "inputs")

    def _bytes(self, stage: int, var: Var) -> int:
        return self.planned.values[stage].device_bytes(var)


def _role_of(task: Task) -> Role:
    """What the results of a task are: gradients of activations come and go."""
    return "activations" if task.phase == "F" else "outputs" if task.phase == "U" else "temporaries"


def _together(fixed: Level, held: Mapping[str, _Value]) -> Level:
    found = dict(fixed)
    for role, size in held.values():
        found[role] = found.get(role, 0) + size
    return found
