"""Steps that follow another one: what both read stays where the first one, a training step as a rule, wants it.

An evaluation of the parameters is planned around where they are: pinned, and for a pipeline in the same stages.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.layers import FollowLayerOption
from autopar.pipeline.partitioner import cut_step
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import MemorySplit, PipelineSchedule, Plan, Stage, TimeSplit, Value
from autopar.planning import coverage_warnings, make_plan, stage_of
from autopar.sharding.options import ShardingOptions
from autopar.sharding.planner import Shardings, plan_shardings
from autopar.sharding.spec import partition_spec
from autopar.trace import StepGraph, named_inputs, trace
from simulator.cluster import Cluster
from simulator.costs import ClusterCosts
from simulator.heterogeneous import AnyCluster

_METHOD = "FollowParallel"


@dataclass(frozen=True, slots=True)
class Home:
    """Where an input of the step that is followed is.

    Attributes:
        stage: of a pipeline; 0 where there is none.
    """

    value: Value
    stage: int = 0


def homes_of(plan: Plan) -> list[Home]:
    """Where the inputs of a plan without a pipeline are."""
    return [Home(value) for value in plan.stages[0].inputs]


def pipeline_homes(planned: PlannedPipeline) -> list[Home]:
    """Where the inputs of a pipelined step are."""
    found = []
    for i, stages in planned.cut.input_stages.items():
        position = planned.graphs[stages[0]].inputs.index(i)
        found.append(Home(planned.plan.stages[stages[0]].inputs[position], stages[0]))
    return found


def find_home(path: str, shape: tuple[int, ...], dtype: Any, homes: Sequence[Home]) -> Home | None:
    """The home of an input of another step: one of its shape, dtype and name.

    `0/Dense_0/kernel` is what `0/params/Dense_0/kernel` is in a train state: names are compared from the end, and parameters
    come before the optimizer's moments of the same name.
    """
    own = path.split("/")[1:]

    def rank(home: Home) -> tuple[bool, bool, int]:
        other = home.value.path.split("/")[1:]
        return other != own, home.value.role != "parameter", len(other)

    fits = [
        home
        for home in homes
        if home.value.role != "batch"
        and own
        and home.value.path.split("/")[1:][-len(own) :] == own
        and (home.value.shape, home.value.dtype) == (shape, str(dtype))
    ]
    return min(fits, key=rank, default=None)


def follow_plan(
    fun: Callable[..., Any], args: Sequence[Any], batch: Collection[int], followed: Plan, cluster: Cluster
) -> tuple[StepGraph, Plan]:
    """`fun` on the mesh of a plan without a pipeline, with what it shares with its step in the same place."""
    step = trace(fun, args, batch)
    homes = homes_of(followed)
    found = {
        path: find_home(path, aval.shape, aval.dtype, homes)
        for path, aval, is_batch in named_inputs(args, batch)
        if not is_batch
    }
    pins = {path: partition_spec(home.value.spec) for path, home in found.items() if home is not None}
    return step, make_plan(step, followed.stages[0].mesh, cluster, ShardingOptions(pins=pins), _METHOD)


def follow_pipeline(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Collection[int],
    num_micro_batches: int,
    followed: PlannedPipeline,
    cluster: AnyCluster,
) -> tuple[StepGraph, Plan]:
    """`fun` in the stages of a pipelined plan, forward only: each equation where the parameters are that it reads."""
    assert followed.plan.pipeline is not None
    homes = pipeline_homes(followed)
    found = [
        None if is_batch else find_home(path, aval.shape, aval.dtype, homes)
        for path, aval, is_batch in named_inputs(args, batch)
    ]
    stages = followed.plan.stages
    option = FollowLayerOption(tuple(None if home is None else home.stage for home in found), len(stages))
    step = trace(fun, args, batch, num_micro_batches, option, marked=True, forward=True)
    cut = cut_step(step, range(len(stages)), homes=option.homes)
    planned = [
        _plan_stage(graph, stage, found, cluster.pools[cluster.pool_of(stage.devices)])
        for graph, stage in zip(stage_graphs(cut), stages, strict=True)
    ]
    seconds = [shardings.seconds for _, shardings in planned]
    fullest = max((shardings for _, shardings in planned), key=lambda shardings: shardings.peak_bytes)
    slowest = planned[seconds.index(max(seconds))][1]
    return step, Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=_METHOD,
        options=ShardingOptions(),
        cluster=cluster.name,
        num_micro_batches=num_micro_batches,
        stages=tuple(stage for stage, _ in planned),
        pipeline=PipelineSchedule(name="inference", num_chunks=followed.plan.pipeline.num_chunks, layer_option=option),
        predicted_seconds=(sum(seconds) + (num_micro_batches - 1) * max(seconds)) / num_micro_batches,
        predicted_split=TimeSplit(**slowest.split._asdict()),
        predicted_bytes=round(fullest.peak_bytes),
        predicted_memory=MemorySplit.of(fullest.roles_at_peak, round(fullest.peak_bytes)),
        gap=None,
        planning_seconds=sum(shardings.solve_seconds for _, shardings in planned),
        warnings=coverage_warnings(step),
    )


def _plan_stage(
    graph: StageGraph, stage: Stage, homes: Sequence[Home | None], cluster: Cluster
) -> tuple[Stage, Shardings]:
    pins = {
        graph.step.in_paths[position]: partition_spec(home.value.spec)
        for position, i in enumerate(graph.inputs)
        if (home := homes[i]) is not None and home.stage == graph.stage
    }
    options = ShardingOptions(pins=pins)
    found = plan_shardings(graph.step, stage.mesh, ClusterCosts(cluster), options, cluster.device.usable_bytes)
    planned = stage_of(graph.step, stage.mesh, found)
    return planned.model_copy(update={"layers": (graph.stage,), "devices": stage.devices}), found
