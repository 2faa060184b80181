"""A step and the plan for it: what runs a plan and what simulates it both start here."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autopar.ir.step_graph import StepGraph
from autopar.layering.layers import FollowLayerOption
from autopar.lowering.cross_mesh_resharding import Resharding, reshard
from autopar.lowering.instructions import Crossing, PipelineProgram, ValueNames, pipeline_program
from autopar.lowering.stage_values import StageValues
from autopar.pipeline.partition import Partition
from autopar.pipeline.partitioner import partition_step, whole_step_partition
from autopar.pipeline.pipeline_schedules import Pipeline, Schedule, make_schedule
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import WHOLE_STEP, Plan
from simulator.program import Program, Run


class Planned(Protocol):
    """A step and the plan for it: an `Executable`, or a `PlannedStep`."""

    @property
    def step(self) -> StepGraph: ...
    @property
    def plan(self) -> Plan: ...


def as_planned(planned: Planned) -> "PlannedStep":
    """Return a step and its plan as a `PlannedStep`; an executable has one, in which the step is cut already."""
    known = getattr(planned, "planned", planned)
    return known if isinstance(known, PlannedStep) else PlannedStep(planned.step, planned.plan)


@dataclass(frozen=True)
class PlannedStep:
    """A traced step and the plan for it, for devices that need not be here, and what follows from the two.

    Raises:
        PlanError: the plan is for another step.
    """

    step: StepGraph
    plan: Plan

    def __post_init__(self) -> None:
        self.plan.check(self.step.fingerprint)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule with all tasks of a step."""
        name, num_chunks = self.plan.schedule.name, self.plan.schedule.num_chunks
        meshes = len(self.plan.stages) // num_chunks
        return make_schedule(name, Pipeline(meshes, self.plan.num_micro_batches, num_chunks))

    @cached_property
    def partition(self) -> Partition:
        """The step as tasks."""
        if self.plan.schedule.is_whole_step:
            return whole_step_partition(self.step)
        stage_of = {layer: s for s, stage in enumerate(self.plan.stages) for layer in stage.layers}
        option = self.plan.schedule.layer_option
        homes = option.homes if isinstance(option, FollowLayerOption) else {}
        stages = [stage_of[layer] for layer in sorted(stage_of)]
        return partition_step(self.step, stages, "W" in self.schedule.phases, homes)

    @cached_property
    def graphs(self) -> list[StageGraph]:
        """Each stage as a step of its own."""
        return stage_graphs(self.partition)

    @cached_property
    def names(self) -> ValueNames:
        """What the program calls the values."""
        return ValueNames.of_cut(self.partition)

    @cached_property
    def values(self) -> list[StageValues]:
        """Where each stage has its values."""
        return [StageValues(*each) for each in zip(self.graphs, self.plan.stages, strict=True)]

    def transfer(self, crossing: Crossing) -> Resharding:
        """Return how a value gets from one stage to another."""
        source, to = self.values[crossing.source], self.values[crossing.to]
        shape, spec = source.shape(crossing.var), source.spec(crossing.var)
        return reshard(shape, (source.mesh, spec), (to.mesh, to.spec(crossing.var)))

    @cached_property
    def instructions(self) -> PipelineProgram:
        """The program and what its sends carry."""
        meshes = tuple(
            stage.devices for stage in self.plan.stages[: self.schedule.pipeline.num_meshes]
        )
        return pipeline_program(self.partition, self.schedule, meshes, self.names, self.transfer)

    @property
    def program(self) -> Program:
        """The instructions, without bodies."""
        return self.instructions.program

    @cached_property
    def tasks(self) -> frozenset[str]:
        """The names of the tasks that the program runs; those with nothing to do are left out."""
        return frozenset(
            each.task for row in self.program.instructions for each in row if isinstance(each, Run)
        )


def single_stage(planned: Planned, stage: int | None) -> Planned:
    """What is asked to be inspected: the plan itself, or one stage of a pipeline.

    Raises:
        ValueError: the plan is a pipeline and `stage` is none of its stages.
    """
    if planned.plan.schedule.is_whole_step:
        return planned
    one = stage_plan(planned.plan, stage)
    step = as_planned(planned).graphs[stage or 0].step
    return PlannedStep(step, one.model_copy(update={"fingerprint": step.fingerprint}))


def stage_plan(plan: Plan, stage: int | None) -> Plan:
    """Return one stage of a plan as a plan. Raises ValueError as `single_stage` does."""
    if plan.schedule.is_whole_step:
        return plan
    last = len(plan.stages) - 1
    if stage is None or not 0 <= stage <= last:
        given = "no stage is given" if stage is None else f"stage {stage} is given"
        raise ValueError(
            f"{given}, but the plan is a pipeline and its stages are looked at one by one: give stage=0 to {last}"
        )
    return plan.model_copy(update={"stages": (plan.stages[stage],), "schedule": WHOLE_STEP})
