"""Steps that follow another one: what both read stays where the first one, a training step as a rule, wants it.

An evaluation of the parameters is planned around where they are: pinned, and for a pipeline in the same stages.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.analysis.axis_uses import with_axis_uses
from autopar.ir.spec import partition_spec
from autopar.layering.layers import FollowLayerOption
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partitioner import partition_step, whole_step_partition
from autopar.pipeline.pipeline_schedules import schedule_kind
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import WHOLE_STEP, MemorySplit, PipelineSchedule, Plan, Stage, TimeSplit, Value
from autopar.planning.step_planner import coverage_warnings, stage_of
from autopar.sharding.options import ShardingOptions
from autopar.sharding.planner import Shardings, plan_shardings
from autopar.tracing.trace import named_inputs, trace
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster

_METHOD = "FollowParallel"


@dataclass(frozen=True, slots=True)
class Home:
    """Where an input of the step that is followed is.

    Attributes:
        stage: number of the stage.
    """

    value: Value
    stage: int = 0


def homes_of(planned: PlannedStep) -> list[Home]:
    """Return where the inputs of a planned step are."""
    homes = []
    for i, stages in planned.partition.input_stages.items():
        position = planned.graphs[stages[0]].inputs.index(i)
        homes.append(Home(planned.plan.stages[stages[0]].inputs[position], stages[0]))
    return homes


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


def follow(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Collection[int],
    num_micro_batches: int,
    followed: PlannedStep,
    cluster: AnyCluster,
) -> PlannedStep:
    """Plan `fun` in the stages of a planned step, forward only: each equation where the parameters are that it reads.

    A step that is not cut is followed by one that is not.

    Raises:
        ValueError: microbatches are asked for, and the step that is followed is not a pipeline.
    """
    homes = homes_of(followed)
    found = [
        None if is_batch else find_home(path, aval.shape, aval.dtype, homes)
        for path, aval, is_batch in named_inputs(args, batch)
    ]
    stages = followed.plan.stages
    if followed.partition.is_whole_step:
        if num_micro_batches > 1:
            raise ValueError(
                f"num_micro_batches is {num_micro_batches}, but {followed.step.name}, which is followed, is no pipeline; leave it out"
            )
        schedule, step = WHOLE_STEP, trace(fun, args, batch)
        partition = whole_step_partition(step)
    else:
        option = FollowLayerOption(
            tuple(None if home is None else home.stage for home in found), len(stages)
        )
        own = followed.plan.schedule
        forward = schedule_kind(own.name).forward
        if not forward:
            raise ValueError(
                f"{followed.step.name} runs by schedule {own.name!r}, which names no schedule of forwards only for steps that follow; give"
                " register_schedule a forward="
            )
        schedule = PipelineSchedule(name=forward, num_chunks=own.num_chunks, layer_option=option)
        step = trace(fun, args, batch, num_micro_batches, option, marked=True, forward=True)
        partition = partition_step(step, range(len(stages)), input_homes=option.homes)
    planned = [
        _plan_stage(graph, stage, found, cluster.pools[cluster.pool_of(stage.devices)])
        for graph, stage in zip(stage_graphs(partition), stages, strict=True)
    ]
    seconds = [shardings.seconds for _, shardings in planned]
    fullest = max(
        (shardings for _, shardings in planned), key=lambda shardings: shardings.peak_bytes
    )
    slowest = planned[seconds.index(max(seconds))][1]
    plan = Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=_METHOD,
        options=ShardingOptions(),
        cluster=cluster.name,
        num_micro_batches=num_micro_batches,
        stages=tuple(stage for stage, _ in planned),
        schedule=schedule,
        predicted_seconds=(sum(seconds) + (num_micro_batches - 1) * max(seconds))
        / num_micro_batches,
        predicted_split=TimeSplit(**slowest.split._asdict()),
        predicted_bytes=round(fullest.peak_bytes),
        predicted_memory=MemorySplit.of(fullest.roles_at_peak, round(fullest.peak_bytes)),
        gap=None,
        planning_seconds=sum(shardings.solve_seconds for _, shardings in planned),
        warnings=coverage_warnings(step),
    )
    return PlannedStep(step, with_axis_uses(step, plan) if partition.is_whole_step else plan)


def _plan_stage(
    graph: StageGraph, stage: Stage, homes: Sequence[Home | None], cluster: Cluster
) -> tuple[Stage, Shardings]:
    pins = {
        graph.step.in_paths[position]: partition_spec(home.value.spec)
        for position, i in enumerate(graph.inputs)
        if (home := homes[i]) is not None and home.stage == graph.stage
    }
    options = ShardingOptions(pins=pins)
    found = plan_shardings(
        graph.step, stage.mesh, ClusterCosts(cluster), options, cluster.device.usable_bytes
    )
    planned = stage_of(graph.step, stage.mesh, found)
    layers = () if graph.partition.is_whole_step else (graph.stage,)
    return planned.model_copy(update={"layers": layers, "devices": stage.devices}), found
