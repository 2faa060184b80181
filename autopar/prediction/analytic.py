"""The analytic front end: the program of a plan with the seconds and the memory that the planner counts, and nothing compiled.

The plan tells which option each decision took (`autopar.analysis.choices`), and so what each equation takes. A task's body has up to
three entries for each: bringing its operands where it wants them, its kernel, and completing its results. Each says its seconds, and waits
for the one before: what XLA may hide behind computation the planner counts in full.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from autopar.analysis.choices import recover
from autopar.analysis.replay import ShardedEquation
from autopar.analysis.reshardings import replayed_resharding_tasks
from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.graph import aval_of
from autopar.ir.spec import local_shape
from autopar.lowering.compilation import lower_stage
from autopar.lowering.pipeline_memory import MeshMemory
from autopar.lowering.planned import Planned, PlannedStep, single_stage
from autopar.microbatch.gradients import accumulate_p
from autopar.pipeline.partition import WHOLE_STEP_TASK, Task
from autopar.pipeline.stage_graph import StageGraph
from autopar.primitives.equation_work import kernel_of
from autopar.sharding.memory_constraint import Memory
from autopar.sharding.memory_roles import roles_at_peak
from autopar.sharding.mesh_costs import Step
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.heterogeneous import AnyCluster
from simulator.hlo.provenance import phase_of
from simulator.memory import MemoryUse, Role
from simulator.program import Program
from simulator.work import (
    Collective,
    CollectiveKind,
    Done,
    Kernel,
    Op,
    OpList,
    Start,
    TrainingPhase,
)

_ARGUMENTS: tuple[Role, ...] = ("parameters", "optimizer", "inputs")
"""What a device holds before the step begins."""


def analytic_program(planned: PlannedStep, cluster: AnyCluster) -> Program:
    """Return the program of a plan on `cluster`, as the planner counts it.

    Raises:
        PlanError: the plan leaves choices to XLA.
        ClusterError: a stage has devices that the cluster lacks, or of several pools.
    """
    bodies: dict[str, OpList] = dict.fromkeys(planned.tasks, ())
    memory, program = MeshMemory(planned), planned.program
    for number, stage in enumerate(planned.plan.stages):
        pool = cluster.pools[cluster.pool_of(stage.devices)]
        told = _Told(single_stage(planned, number), ClusterCosts(pool))
        tasks = _numbers(planned.graphs[number])
        last = [task for task in tasks if task.phase != "U"][-1]
        for task, numbers in tasks.items():
            runs = 1 if task.phase == "S" else planned.step.num_micro_batches
            bodies[task.name] = told.body(numbers, runs, adds=task == last)
        if planned.partition.is_whole_step:
            memory.add_task(WHOLE_STEP_TASK, _memory_use(told.held()))
            continue
        for function in lower_stage(
            planned, number, stage.mesh.abstract(), frozenset(planned.step.carried.values())
        ):
            temporaries = told.temporaries(
                [n for n, _ in planned.graphs[number].tasks[function.task]]
            )
            reused = sum(map(planned.values[number].device_bytes, function.reused))
            used = MemoryUse(outputs=reused, aliased=reused, temporaries=sum(temporaries.values()))
            memory.add_task(function.task, used, temporaries)
    levels = memory.levels(program)
    return replace(program, bodies=bodies, memory=memory.peaks(levels), levels=levels)


def _numbers(graph: StageGraph) -> dict[Task, list[int]]:
    """The equations that count in each task; those of no task in the update."""
    rest = next((task for task in graph.tasks if task.phase == "U"), [*graph.tasks][-1])
    found: dict[Task, list[int]] = {task: [] for task in graph.tasks}
    for number in range(len(graph.step.jaxpr.eqns)):
        found[graph.task_of.get(number, rest)].append(number)
    return found


class _Told:
    """What the planner counts for a step on one mesh."""

    def __init__(self, planned: Planned, costs: ClusterCosts) -> None:
        self._step = planned.step
        self._choices = recover(planned, costs, planned.plan.options)
        self._mesh = self._choices.replay.mesh
        eqns = planned.step.jaxpr.eqns
        self._seconds = self._choices.decisions.seconds_by_equation(
            self._choices.selected, len(eqns)
        )
        self._times = repeats(eqns)
        self._moves: defaultdict[int, list[Step]] = defaultdict(list)
        # what brings operands where an equation wants them; after the last one, outputs where they are wanted
        for change in replayed_resharding_tasks(planned, self._choices.replay):
            self._moves[len(eqns) - 1 if change.eqn is None else change.eqn] += change.collectives
        micro = planned.step.microbatching
        self._in_microbatches = {number for number, _ in micro.body} if micro else set()
        self._marks = [number for number, _ in micro.marks] if micro else []

    def body(self, numbers: Iterable[int], runs: int = 1, adds: bool = False) -> OpList:
        """These equations, of which those of microbatches run so many times in a step; it may add up what microbatches make, too."""
        ops = [
            op for n in numbers for op in self._ops(n, runs if n in self._in_microbatches else 1)
        ]
        for number in self._marks if adds else ():
            seconds = self._seconds[number].compute / runs
            ops.append(
                Kernel(f"accumulate #{number}", "memory", 0.0, 0.0, seconds=seconds, phase="update")
            )
        return tuple(ops)

    def held(self) -> dict[Role, int]:
        """Bytes on one device when they are most."""
        return self._whole(roles_at_peak(self._memory, self._choices.selected))

    def temporaries(self, numbers: Sequence[int]) -> dict[Role, int]:
        """Bytes on one device while these equations run, beside what the tasks of a stage get and give."""
        given = {*self._step.jaxpr.invars, *self._step.jaxpr.outvars, *self._step.handed_on}
        for _, mark in self._step.microbatching.marks if self._step.microbatching else ():
            given.update((*mark.invars, *mark.outvars))
        return self._whole(roles_at_peak(self._memory, self._choices.selected, numbers, given))

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self._step, self._choices.decisions, self._mesh)

    @staticmethod
    def _whole(sizes: Mapping[Role, float]) -> dict[Role, int]:
        return {role: round(size) for role, size in sizes.items()}

    def _ops(self, number: int, runs: int) -> Iterator[Op]:
        each = self._choices.replay.equations[number]
        name, phase = f"{each.name} #{number}", phase_of(str(each.eqn.source_info.name_stack))
        compute, communication, resharding = (seconds / runs for seconds in self._seconds[number])
        if resharding:
            kind, _, axes = next(iter(self._moves[number]), ("", 0.0, ()))
            yield from self._collective(f"operands of {name}", kind, axes, resharding, phase)
        kernel = self._kernel(each)
        if (compute or kernel.flops) and each.eqn.primitive is not accumulate_p:
            count = self._step.num_micro_batches if number in self._in_microbatches else 1
            flops = kernel.flops * self._times[number] * count / runs
            yield replace(kernel, name=name, flops=flops, seconds=compute, phase=phase)
        if communication:
            synchronised = each.synchronised(0) if each.eqn.primitive is accumulate_p else {}
            found = each.completions or tuple((kind, axis) for axis, kind in synchronised.items())
            axes = tuple(axis for _, axis in found)
            yield from self._collective(
                name, found[0][0] if found else "", axes, communication, phase
            )

    def _kernel(self, each: ShardedEquation) -> Kernel:
        if each.eqn.primitive in MARKERS or each.factors is None or not each.eqn.outvars:
            return Kernel("", "memory", 0.0, 0.0)
        atoms, specs = (*each.eqn.invars, *each.eqn.outvars), (*each.operands, *each.results)
        shapes = [
            local_shape(aval_of(a).shape, spec, self._mesh)
            for a, spec in zip(atoms, specs, strict=True)
        ]
        moved = sum(
            array_bytes(shape, aval_of(a).dtype) for shape, a in zip(shapes, atoms, strict=True)
        )
        return kernel_of(each.eqn, shapes[: len(each.eqn.invars)], moved)

    def _collective(
        self,
        name: str,
        kind: CollectiveKind | Literal[""],
        axes: tuple[str, ...],
        seconds: float,
        phase: TrainingPhase,
    ) -> Iterator[Op]:
        """What communication takes, under the name of its first kind; a kernel, if all that there is to do is to copy."""
        if not kind:
            yield Kernel(name, "memory", 0.0, 0.0, seconds=seconds, phase=phase)
            return
        yield Start(
            Collective(
                name, kind, 0.0, self._mesh.groups(axes), seconds, axis=self._mesh.joined(axes)
            )
        )
        yield Done(name)


def _memory_use(held: Mapping[Role, int]) -> MemoryUse:
    arguments = sum(size for role, size in held.items() if role in _ARGUMENTS)
    return MemoryUse(arguments=arguments, temporaries=sum(held.values()) - arguments, roles=held)
