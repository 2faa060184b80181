"""A traced step with its plan: the common input of execution, simulation and reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import isinf
from typing import Protocol

from autopar.ir.step_graph import StepGraph
from autopar.layering.layer_options import FollowLayerOption
from autopar.layering.layer_scopes import num_layers
from autopar.lowering.cross_mesh_resharding import Resharding, reshard
from autopar.lowering.instructions import Crossing, PipelineProgram, ValueNames, pipeline_program
from autopar.lowering.stage_values import StageValues
from autopar.pipeline.partition import Partition
from autopar.pipeline.partitioner import partition_step, stages_of_layers, whole_step_partition
from autopar.pipeline.pipeline_schedules import (
    Schedule,
    has_backward,
    make_schedule,
    splits_backward,
)
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import WHOLE_STEP, PipelineSchedule, Plan, PlanError
from simulator.program import Program, Run


class Planned(Protocol):
    """A step with its plan: an `Executable` or a `PlannedStep`."""

    @property
    def step(self) -> StepGraph:
        """The traced step."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan."""
        ...


def as_planned(planned: Planned) -> "PlannedStep":
    """Return a step and its plan as a `PlannedStep`.

    An executable has one already, whose step is already partitioned.
    """
    inner = getattr(planned, "planned", planned)
    return inner if isinstance(inner, PlannedStep) else PlannedStep(planned.step, planned.plan)


@dataclass(frozen=True)
class PlannedStep:
    """A traced step, the plan for it, and what follows from the two; no device is needed.

    Attributes:
        step: the traced step.
        plan: the plan.

    Raises:
        PlanError: the plan is for another step.
    """

    step: StepGraph
    plan: Plan

    def __post_init__(self) -> None:
        self.plan.check(self.step.fingerprint)

    def within(self, memory_budget: float | None) -> "PlannedStep":
        """Return the step with a memory budget in its plan, in bytes of one device."""
        if memory_budget is None or isinf(memory_budget):
            return self
        plan = self.plan.model_copy(update={"memory_budget": float(memory_budget)})
        return PlannedStep(self.step, plan)

    @cached_property
    def first_pass(self) -> "PlannedStep | None":
        """The pass over the microbatches that runs before this one; None if there is none."""
        if self.step.first_pass is None:
            return None
        if self.plan.first_pass is None:
            raise PlanError(
                f"{self.step.name} runs in two passes over its microbatches, but the plan has one;"
                " plan the step again"
            )
        plans = self.plan, self.plan.first_pass
        meshes, first_meshes = ([stage.mesh for stage in plan.stages] for plan in plans)
        devices = [[stage.devices for stage in plan.stages] for plan in plans]
        if meshes != first_meshes or devices[0] != devices[1]:
            raise PlanError(
                f"the first pass of {self.step.name} has {len(first_meshes)} stages on devices"
                f" {devices[1]}, expected those of the step, {len(meshes)} on {devices[0]}; plan"
                " the step again"
            )
        return PlannedStep(self.step.first_pass.step, self.plan.first_pass)

    @property
    def program_budget(self) -> float | None:
        """Bytes of one device that the program of a whole step may take; None for no limit."""
        return self.plan.memory_budget if self.plan.schedule.is_whole_step else None

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule with all tasks of a step."""
        name, num_chunks = self.plan.schedule.name, self.plan.schedule.num_chunks
        meshes = len(self.plan.stages) // num_chunks
        return make_schedule(name, Pipeline(meshes, self.plan.num_micro_batches, num_chunks))

    @cached_property
    def partition(self) -> Partition:
        """The step as tasks."""
        layers = [stage.layers for stage in self.plan.stages]
        return scheduled_partition(self.step, self.plan.schedule, layers)

    @cached_property
    def graphs(self) -> list[StageGraph]:
        """Each stage as a step of its own."""
        return stage_graphs(self.partition)

    @cached_property
    def names(self) -> ValueNames:
        """Names of the values in the program."""
        return ValueNames.of_partition(self.partition)

    @cached_property
    def values(self) -> list[StageValues]:
        """Shapes and specs of each stage's values."""
        pairs = zip(self.graphs, self.plan.stages, strict=True)
        return [StageValues(graph, stage) for graph, stage in pairs]

    def transfer(self, crossing: Crossing) -> Resharding:
        """Return how a value is resharded from one stage to another."""
        var = crossing.var
        source, to = self.values[crossing.source], self.values[crossing.to]
        return reshard(source.shape(var), (source.mesh, source.spec(var)), (to.mesh, to.spec(var)))

    @cached_property
    def instructions(self) -> PipelineProgram:
        """The program with the values that its instructions name."""
        _check_order(self.partition, self.schedule)
        meshes = tuple(
            stage.devices for stage in self.plan.stages[: self.schedule.pipeline.num_meshes]
        )
        return pipeline_program(self.partition, self.schedule, meshes, self.names, self.transfer)

    @property
    def program(self) -> Program:
        """The instructions, without bodies of tasks."""
        return self.instructions.program

    @cached_property
    def tasks(self) -> frozenset[str]:
        """Names of the tasks that the program runs. Tasks with nothing to do are left out."""
        instructions = (instruction for row in self.program.instructions for instruction in row)
        return frozenset(run.task for run in instructions if isinstance(run, Run))


def scheduled_partition(
    step: StepGraph, schedule: PipelineSchedule, layers: Sequence[Sequence[int]]
) -> Partition:
    """Return the tasks of a step that runs by a schedule.

    Args:
        step: the step.
        schedule: the schedule.
        layers: the layers of each stage.

    Raises:
        PlanError: the stages do not have each layer once, and do not follow those of another step.
    """
    if schedule.is_whole_step:
        return whole_step_partition(step)
    found, count = sorted(chain(*layers)), num_layers(step.jaxpr)
    option = schedule.layer_option
    if isinstance(option, FollowLayerOption):
        homes, forward = option.layer_of_input, not has_backward(schedule.name)
    elif found == list(range(count)):
        homes, forward = {}, False
    else:
        raise PlanError(
            f"the stages of the plan have layers {found}, expected each of the step's {count}"
            f" layers (0 to {count - 1}) once; plan the step again"
        )
    is_split = splits_backward(schedule.name)
    return partition_step(step, stages_of_layers(layers, count), is_split, homes, forward)


def _check_order(partition: Partition, schedule: Schedule) -> None:
    """Check that tasks that put rows together run the microbatches in order: they count them.

    Raises:
        PlanError: one does not.
    """
    joining = {
        (task.stage, task.phase)
        for task, totals in partition.totals.items()
        if any(total.index is not None for total in totals)
    }
    for row in schedule.rows:
        for stage, phase in joining:
            order = [run.micro_batch for run in row if (run.stage, run.phase) == (stage, phase)]
            if order != sorted(order):
                raise PlanError(
                    f"schedule {schedule.name!r} runs the microbatches of stage {stage} in the"
                    f" order {order}, but the step returns or reads rows of all microbatches, which"
                    " are put together in order; use a schedule that keeps the order"
                )


def single_stage(planned: Planned, stage: int | None) -> Planned:
    """Return what a report is about: the plan itself, or one stage of a pipeline.

    Args:
        planned: a step with its plan.
        stage: number of the stage; None for a plan that is not a pipeline.

    Raises:
        ValueError: as `stage_plan`.
    """
    plan = stage_plan(planned.plan, stage)
    if planned.plan.schedule.is_whole_step:
        return planned
    step = as_planned(planned).graphs[stage or 0].step
    return PlannedStep(step, plan.model_copy(update={"fingerprint": step.fingerprint}))


def stage_plan(plan: Plan, stage: int | None) -> Plan:
    """Return one stage of a plan as a plan.

    Args:
        plan: a plan.
        stage: number of the stage; None for a plan that is not a pipeline.

    Raises:
        ValueError: the plan is a pipeline and `stage` is none of its stages; or it is not a
            pipeline and `stage` is another one than 0.
    """
    if plan.schedule.is_whole_step:
        if stage:
            raise ValueError(
                f"stage {stage} is given, but the plan is not a pipeline; leave out the stage"
            )
        return plan
    last = len(plan.stages) - 1
    if stage is None or not 0 <= stage <= last:
        given = "no stage is given" if stage is None else f"stage {stage} is given"
        raise ValueError(
            f"{given}, but the plan is a pipeline, whose stages are reported one by one; give"
            f" stage=0 to {last}"
        )
    return plan.model_copy(update={"stages": (plan.stages[stage],), "schedule": WHOLE_STEP})
