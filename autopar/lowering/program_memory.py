"""Memory of a pipeline over time: the bytes of one device of each mesh by role."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Var

from autopar.lowering.instructions import micro_batch_of, task_of
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from simulator.memory import Level, MemoryUse, Role, apportion, level_of, sum_roles, with_roles
from simulator.program import Free, Program, Recv, Run, Send

type Levels = tuple[tuple[tuple[Level, Level], ...], ...]
"""For each mesh and instruction the bytes by role while it runs and after it, arguments included.

See `simulator.program.Program.levels`.
"""


class _Value(NamedTuple):
    """A value that lives on a mesh, with the bytes of one device's shard."""

    role: Role
    num_bytes: int


class MeshMemory:
    """Liveness on each mesh: its state, the sums of microbatches, and values until they are freed.

    Attributes:
        planned: the step with its plan.
    """

    def __init__(self, planned: PlannedStep) -> None:
        self.planned = planned
        self._tasks: dict[Task, tuple[MemoryUse, Mapping[Role, int]]] = {}

    def add_task(
        self, task: Task, used: MemoryUse, temporaries: Mapping[Role, float] | None = None
    ) -> None:
        """Add the memory that a task needs while it runs.

        Args:
            task: the task.
            used: its arguments, outputs and temporaries.
            temporaries: its temporaries by role, if they are known.
        """
        self._tasks[task] = used, apportion(temporaries or {}, used.temporaries, "temporaries")

    def peaks(self, levels: Levels) -> tuple[MemoryUse, ...]:
        """Return the memory of each mesh at its peak.

        Inputs of the step are arguments, and everything else is temporary. For a step that is one
        program, this is the memory of that program.
        """
        if self.planned.partition.is_whole_step:
            return (self._whole_step(),)
        return tuple(
            self._peak(mesh, [during for during, _ in mesh_levels])
            for mesh, mesh_levels in enumerate(levels)
        )

    def levels(self, program: Program) -> Levels:
        """Return the memory of each mesh during and after each instruction."""
        meshes = range(len(program.meshes))
        return tuple(tuple(self._mesh_levels(mesh, program)) for mesh in meshes)

    def whole_step_levels(
        self, temporaries: Iterable[Mapping[Role, float]], peak: Mapping[Role, float]
    ) -> tuple[Level, ...]:
        """Return the memory at several times of the one program of a step that is not partitioned.

        Args:
            temporaries: estimates of its temporaries by role at each time.
            peak: the estimates at the peak.
        """
        used, _ = self._tasks[WHOLE_STEP_TASK]
        arguments = self.arguments(0)
        return tuple(level_of(used, arguments, level, peak) for level in temporaries)

    def _whole_step(self) -> MemoryUse:
        """Return the memory of the one program of a step that is not partitioned."""
        used, temporaries = self._tasks.get(WHOLE_STEP_TASK, (MemoryUse(), {}))
        return used if used.roles else with_roles(used, self.arguments(0), temporaries)

    def _peak(self, mesh: int, levels: Iterable[Level]) -> MemoryUse:
        fixed = self.arguments(mesh)
        arguments = sum(fixed.values())
        peak = max(levels, key=lambda level: sum(level.values()), default=fixed)
        return MemoryUse(arguments, temporaries=sum(peak.values()) - arguments, roles=peak)

    def arguments(self, mesh: int) -> Level:
        """Return the memory of the step's inputs on a mesh."""
        return self._of_inputs(mesh, without=())

    def unread(self, mesh: int) -> Level:
        """Return the memory of the step's arguments on a mesh that its first pass does not read."""
        step = self.planned.step
        reads = step.first_pass.reads if step.first_pass else ()
        return self._of_inputs(mesh, without={*reads, *step.completed})

    def _of_inputs(self, mesh: int, without: Collection[int]) -> Level:
        """Return the memory of the inputs on a mesh, but for those with the given numbers.

        State that other stages read, such as tied weights, is in its home alone: they receive it.
        """
        partition, mesh_of = self.planned.partition, self.planned.schedule.mesh_of
        carried = set(partition.step.carried.values())
        memory: dict[Role, int] = {}
        for i, stages in partition.input_stages.items():
            if i in without:
                continue
            if i in carried:
                stages = stages[:1]
            local_stages = [stage for stage in stages if mesh_of(stage) == mesh]
            if local_stages:
                var = partition.step.jaxpr.invars[i]
                size = self._bytes(local_stages[0], var) * partition.input_microbatches(i)
                memory = sum_roles(memory, {self._role(local_stages[0], var): size})
        return memory

    def _mesh_levels(self, mesh: int, program: Program) -> Iterator[tuple[Level, Level]]:
        """Yield the memory of a mesh during and after each instruction."""
        fixed = self.arguments(mesh)
        live = self._sums(mesh)
        reads = self._reads(mesh, program)
        now = _total(fixed, live)
        for instruction in program.instructions[mesh]:
            before = during = now
            match instruction:
                case Run(phase="S"):
                    during = self._whole_step().roles
                case Run():
                    results = self._results(instruction)
                    now, temporaries = self._after(before, task_of(instruction), results)
                    during = sum_roles(now, temporaries)
                    if instruction.phase == "U":  # results replace the state that they update
                        now = before
                    else:
                        live.update(results)
                case Recv(value):
                    live[value] = reads.get(value, _Value("activations", 0))
                    during = now = sum_roles(before, {live[value].role: live[value].num_bytes})
                case Free(values):
                    for value in values:
                        live.pop(value, None)
                    now = _total(fixed, live)
                case Send():
                    pass
            yield during, now

    def _after(
        self, before: Level, task: Task, results: Mapping[str, _Value]
    ) -> tuple[Level, Mapping[Role, int]]:
        """Return the memory after a task, and the temporaries that it needs while it runs."""
        used, temporaries = self._tasks.get(task, (MemoryUse(), {}))
        totals = self.planned.partition.totals.get(task, ())
        sums = sum(self._bytes(task.stage, total.sum) for total in totals)
        written_over = max(0, used.aliased - sums)  # sums are aliased, but are no results
        new = sum(value.num_bytes for value in results.values()) - written_over
        return sum_roles(before, {_role_of(task): new}), temporaries

    def _sums(self, mesh: int) -> dict[str, _Value]:
        """Return the sums of microbatches on a mesh."""
        names, mesh_of = self.planned.names, self.planned.schedule.mesh_of
        return {
            names.of(total.sum, 0): _Value(
                "gradients" if total.index is None else "activations",
                self._bytes(task.stage, total.sum),
            )
            for task, totals in self.planned.partition.totals.items()
            if mesh_of(task.stage) == mesh
            for total in totals
        }

    def _results(self, run: Run) -> dict[str, _Value]:
        """Return the values that a task computes for others."""
        names, task = self.planned.names, task_of(run)
        return {
            names.of(var, micro_batch_of(run)): _Value(_role_of(task), self._bytes(run.stage, var))
            for var in self.planned.partition.results[task]
        }

    def _reads(self, mesh: int, program: Program) -> dict[str, _Value]:
        """Return the values that the tasks of a mesh read."""
        return {
            self.planned.names.of(var, micro_batch_of(run)): _Value(
                self._role(run.stage, var), self._bytes(run.stage, var)
            )
            for run in program.instructions[mesh]
            if isinstance(run, Run)
            for var in self.planned.partition.reads[task_of(run)]
        }

    def _role(self, stage: int, var: Var) -> Role:
        producer = self.planned.partition.producers.get(var)
        if producer is not None:
            return _role_of(producer)
        return self.planned.values[stage].roles.get(var, "inputs")

    def _bytes(self, stage: int, var: Var) -> int:
        return self.planned.values[stage].device_bytes(var)


def _role_of(task: Task) -> Role:
    """Return the role of a task's results. Gradients of activations are temporaries."""
    return "activations" if task.phase == "F" else "outputs" if task.phase == "U" else "temporaries"


def _total(fixed: Level, live: Mapping[str, _Value]) -> Level:
    """Return the memory of values on top of fixed memory."""
    memory = dict(fixed)
    for role, size in live.values():
        memory[role] = memory.get(role, 0) + size
    return memory
