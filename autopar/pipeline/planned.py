"""A step and its pipelined plan, made whole again: what runs it and what simulates it both start here."""

from functools import cached_property

from autopar.layers import FollowLayerOption, layer_of
from autopar.pipeline.cross_mesh_resharding import Resharding, reshard
from autopar.pipeline.instructions import Crossing, Names, PipelineProgram, pipeline_program
from autopar.pipeline.partition import Cut
from autopar.pipeline.partitioner import cut_step
from autopar.pipeline.pipeline_schedules import Pipeline, Schedule, make_schedule
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.pipeline.stage_values import StageValues
from autopar.plan import PlanError
from autopar.planned import PlannedStep
from autopar.trace import StepGraph
from simulator.program import Program, Run


class PlannedPipeline(PlannedStep):
    """A traced step and its pipelined plan, and what follows from the two."""

    @cached_property
    def schedule(self) -> Schedule:
        pipeline = self.plan.pipeline
        if pipeline is None:
            raise PlanError("this plan is not for a pipeline")
        meshes = len(self.plan.stages) // pipeline.num_chunks
        return make_schedule(pipeline.name, Pipeline(meshes, self.plan.num_micro_batches, pipeline.num_chunks))

    @cached_property
    def cut(self) -> Cut:
        stage_of = {layer: s for s, stage in enumerate(self.plan.stages) for layer in stage.layers}
        assert self.plan.pipeline is not None
        option = self.plan.pipeline.layer_option
        homes = option.homes if isinstance(option, FollowLayerOption) else {}
        stages = [stage_of[layer] for layer in sorted(stage_of)]
        return cut_step(self.step, stages, "W" in self.schedule.phases, homes)

    @cached_property
    def graphs(self) -> list[StageGraph]:
        return stage_graphs(self.cut)

    @cached_property
    def names(self) -> Names:
        return Names.of_cut(self.cut)

    @cached_property
    def values(self) -> list[StageValues]:
        """Where each stage has its values."""
        return [StageValues(*each) for each in zip(self.graphs, self.plan.stages, strict=True)]

    def transfer(self, crossing: Crossing) -> Resharding:
        """How a value gets from one stage to another."""
        source, to = self.values[crossing.source], self.values[crossing.to]
        shape, spec = source.shape(crossing.var), source.spec(crossing.var)
        return reshard(shape, (source.mesh, spec), (to.mesh, to.spec(crossing.var)))

    @cached_property
    def instructions(self) -> PipelineProgram:
        """The program and what its sends carry."""
        meshes = tuple(stage.devices for stage in self.plan.stages[: self.schedule.pipeline.num_meshes])
        return pipeline_program(self.cut, self.schedule, meshes, self.names, self.transfer)

    @property
    def program(self) -> Program:
        return self.instructions.program

    @cached_property
    def tasks(self) -> frozenset[str]:
        """The names of the tasks that the program runs; those with nothing to do are left out."""
        return frozenset(each.task for row in self.program.instructions for each in row if isinstance(each, Run))


def num_layers(step: StepGraph) -> int:
    """The number of layers that a traced step has; 0 if it has none."""
    found = (layer_of(eqn) for eqn in step.jaxpr.eqns)
    return max((each[0] for each in found if each is not None), default=-1) + 1
