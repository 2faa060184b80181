"""The analytic program of a plan: seconds and memory of the planner's model, without compilation.

The shardings of a plan identify the option of each decision (`autopar.analysis.choices`), and the
option its cost. Each equation becomes operations of its task: the collectives that reshard its
operands, its kernel, and the collectives that complete its results. They run one after the other:
communication that XLA may overlap with computation counts in full, as in the planner.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.analysis.choices import recover
from autopar.analysis.planned_collectives import collectives_by_equation
from autopar.analysis.replay import ShardedEquation
from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.graph import aval_of, variables
from autopar.ir.spec import local_shape
from autopar.lowering.compilation import lower_stage
from autopar.lowering.planned import Planned, PlannedStep, single_stage
from autopar.lowering.program_memory import MeshMemory
from autopar.microbatch.gradients import accumulate_p
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from autopar.pipeline.stage_graph import StageGraph
from autopar.primitives import kernel_of
from autopar.sharding.mesh_costs import MeshCosts, Step
from autopar.sharding.step_memory import StepMemory
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.heterogeneous import AnyCluster
from simulator.hlo.provenance import phase_of
from simulator.live_ranges import fullest
from simulator.memory import Level, MemoryUse, Role
from simulator.program import Program
from simulator.work import (
    Collective,
    Done,
    Kernel,
    Op,
    OpList,
    Start,
    TrainingPhase,
)

_ARGUMENTS: tuple[Role, ...] = ("parameters", "optimizer", "inputs")
"""The roles of memory that is allocated before the step begins."""


def analytic_program(planned: PlannedStep, cluster: AnyCluster) -> Program:
    """Return the program of a plan on a cluster in the planner's model.

    Args:
        planned: the step and its plan.
        cluster: the cluster; its devices need not be present.

    Returns:
        The program, with the operations of each task and the memory of each mesh.

    Raises:
        PlanError: the plan leaves decisions to XLA.
        ClusterError: a stage has devices that the cluster lacks, or of several pools.
    """
    bodies: dict[str, OpList] = dict.fromkeys(planned.tasks, ())
    op_levels: dict[str, tuple[Level, ...]] = {}
    memory = MeshMemory(planned)
    program = planned.program
    donated = frozenset(planned.step.carried.values())
    for number, stage in enumerate(planned.plan.stages):
        pool = cluster.pools[cluster.pool_of(stage.devices)]
        model = _StageModel(single_stage(planned, number), ClusterCosts(pool))
        graph = planned.graphs[number]
        tasks = _charged_equations(graph)
        last = [task for task in tasks if task.phase != "U"][-1]
        if planned.partition.is_whole_step:
            operations = model.operations(tasks[WHOLE_STEP_TASK], accumulates=True)
            bodies[WHOLE_STEP_TASK.name] = tuple(op for _, op in operations)
            memory.add_task(WHOLE_STEP_TASK, _memory_use(model.peak_memory()))
            op_levels[WHOLE_STEP_TASK.name] = model.levels([number for number, _ in operations])
            continue
        for task, numbers in tasks.items():
            operations = model.operations(
                numbers, planned.step.num_micro_batches, accumulates=task == last
            )
            bodies[task.name] = tuple(op for _, op in operations)
        for function in lower_stage(planned, number, stage.mesh.abstract(), donated):
            temporaries = model.temporaries([n for n, _ in graph.tasks[function.task]])
            reused = sum(map(planned.values[number].device_bytes, function.reused))
            used = MemoryUse(outputs=reused, aliased=reused, temporaries=sum(temporaries.values()))
            memory.add_task(function.task, used, temporaries)
    levels = memory.levels(program)
    return replace(
        program,
        bodies=bodies,
        memory=memory.peaks(levels),
        levels=levels,
        op_levels=op_levels,
    )


def _charged_equations(graph: StageGraph) -> dict[Task, list[int]]:
    """Return the equations charged to each task; equations of no task go to the update."""
    default = next((task for task in graph.tasks if task.phase == "U"), [*graph.tasks][-1])
    numbers: dict[Task, list[int]] = {task: [] for task in graph.tasks}
    for number in range(len(graph.step.jaxpr.eqns)):
        numbers[graph.task_of.get(number, default)].append(number)
    return numbers


class _StageModel:
    """The planner's model of a stage: operations with their seconds, and memory by role."""

    def __init__(self, planned: Planned, costs: ClusterCosts) -> None:
        self._step = planned.step
        self._choices = recover(planned, costs, planned.plan.options)
        self._mesh = self._choices.replay.mesh
        eqns = planned.step.jaxpr.eqns
        self._seconds = self._choices.decisions.seconds_by_equation(
            self._choices.selected, len(eqns)
        )
        self._times = repeats(eqns)
        self._costs = MeshCosts(self._mesh, costs)
        self._collectives = collectives_by_equation(
            planned, self._choices.replay, self._costs.completes_behind_loops
        )
        micro = planned.step.microbatching
        self._in_microbatches = {number for number, _ in micro.body} if micro else set()
        self._marks = [number for number, _ in micro.marks] if micro else []

    def operations(
        self, numbers: Iterable[int], runs: int = 1, accumulates: bool = False
    ) -> list[tuple[int, Op]]:
        """Return the operations of one run of a task, each with the number of its equation.

        Args:
            numbers: numbers of its equations.
            runs: number of runs in a step, by which the seconds of microbatches are divided.
            accumulates: whether the task also adds the results of its microbatch to the sums.
        """
        ops = [
            (n, op)
            for n in numbers
            for op in self._ops(n, runs if n in self._in_microbatches else 1)
        ]
        for number in self._marks if accumulates else ():
            name, seconds = f"accumulate #{number}", self._seconds[number].compute / runs
            kernel = Kernel(name, "memory", 0.0, 0.0, seconds=seconds, phase="update")
            ops.append((number, kernel))
        return sorted(ops, key=lambda numbered: numbered[0])

    def levels(self, numbers: Sequence[int]) -> tuple[Level, ...]:
        """Return the bytes on one device by role while each operation runs.

        An equation without an operation takes no time; its memory counts with the next operation,
        or with the last one.

        Args:
            numbers: the number of the equation of each operation, in ascending order.
        """
        points = self._memory.levels(self._choices.selected)
        levels = []
        next_point = 0
        for position, number in enumerate(numbers):
            start = min(next_point, number)
            next_point = number + 1 if position < len(numbers) - 1 else len(points)
            levels.append(_rounded(fullest(points[start:next_point])))
        return tuple(levels)

    def peak_memory(self) -> dict[Role, int]:
        """Return the bytes on one device at its peak, by role."""
        return _rounded(self._memory.roles_at_peak(self._choices.selected))

    def temporaries(self, numbers: Sequence[int]) -> dict[Role, int]:
        """Return the peak bytes on one device by role while the given equations run.

        Inputs and outputs of the stage's tasks do not count.
        """
        task_values = {
            *self._step.jaxpr.invars,
            *variables(self._step.jaxpr.outvars),
            *self._step.cross_task_values,
        }
        for _, mark in self._step.microbatching.marks if self._step.microbatching else ():
            task_values.update(variables((*mark.invars, *mark.outvars)))
        return _rounded(self._memory.roles_at_peak(self._choices.selected, numbers, task_values))

    @cached_property
    def _memory(self) -> StepMemory:
        return StepMemory(self._step, self._choices.decisions, self._mesh)

    def _ops(self, number: int, runs: int) -> Iterator[Op]:
        """Yield the operations of one run of an equation: resharding, kernel, completion."""
        equation = self._choices.replay.equations[number]
        name = f"{equation.name} #{number}"
        phase = phase_of(str(equation.eqn.source_info.name_stack))
        compute, communication, resharding = (seconds / runs for seconds in self._seconds[number])
        collectives = self._collectives[number]
        count = self._step.num_micro_batches if number in self._in_microbatches else 1
        repetitions = count / runs  # one operation stands for all microbatches of the task
        yield from self._communicate(
            f"operands of {name}", collectives.reshardings, repetitions, resharding, phase
        )
        accumulates = equation.eqn.primitive is accumulate_p
        kernel = self._kernel(equation)
        if (compute or kernel.flops) and not accumulates:
            times = self._times[number] * repetitions  # and for all iterations of a loop
            flops, num_bytes = kernel.flops * times, kernel.bytes * times
            yield replace(
                kernel, name=name, flops=flops, bytes=num_bytes, seconds=compute, phase=phase
            )
        yield from self._communicate(
            name, collectives.completions, repetitions, communication, phase
        )

    def _kernel(self, equation: ShardedEquation) -> Kernel:
        """Return the kernel of an equation on one device, without seconds."""
        eqn = equation.eqn
        if eqn.primitive in MARKERS or equation.factors is None or not eqn.outvars:
            return Kernel("", "memory", 0.0, 0.0)
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        specs = (*equation.operands, *equation.results)
        shapes = [
            local_shape(aval.shape, spec, self._mesh)
            for aval, spec in zip(avals, specs, strict=True)
        ]
        num_bytes = sum(
            array_bytes(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)
        )
        partial = [
            local_shape(
                aval_of(var).shape,
                equation.factors.result_spec(r, equation.assignment),
                self._mesh,
            )
            for r, var in enumerate(eqn.outvars)
        ]
        return kernel_of(eqn, num_bytes, [*shapes[: len(eqn.invars)], *partial])

    def _communicate(
        self,
        name: str,
        steps: Sequence[Step],
        repetitions: float,
        seconds: float,
        phase: TrainingPhase,
    ) -> Iterator[Op]:
        """Yield the collectives of an equation, among which its seconds are divided.

        Without collectives all devices only copy their own data, which is a kernel.

        Args:
            name: name of the operation.
            steps: the collectives of one run of the equation.
            repetitions: number of runs.
            seconds: their seconds in the planner's model. They are divided in proportion to those
                of single collectives: XLA combines some.
            phase: the part of the training step.
        """
        if not steps:
            if seconds:
                yield Kernel(name, "memory", 0.0, 0.0, seconds=seconds, phase=phase)
            return
        shares = [self._costs.collective(*step) for step in steps]
        total = sum(shares)
        for number, (step, share) in enumerate(zip(steps, shares, strict=True)):
            kind, num_bytes, axes = step
            part = share / total if total else 1 / len(steps)
            unique_name = f"{name}, {number + 1} of {len(steps)}" if len(steps) > 1 else name
            collective = Collective(
                unique_name,
                kind,
                num_bytes * repetitions,
                self._mesh.groups(axes),
                seconds * part,
                axis=self._mesh.axes_text(axes),
            )
            yield Start(collective)
            yield Done(unique_name)


def _rounded(sizes: Mapping[Role, float]) -> dict[Role, int]:
    return {role: round(size) for role, size in sizes.items()}


def _memory_use(roles: Mapping[Role, int]) -> MemoryUse:
    arguments = sum(size for role, size in roles.items() if role in _ARGUMENTS)
    return MemoryUse(arguments=arguments, temporaries=sum(roles.values()) - arguments, roles=roles)
