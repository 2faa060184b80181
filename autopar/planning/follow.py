"""Plans for steps that follow another one, as an evaluation follows a training step.

Inputs that both steps read stay where the followed step places them: their shardings are pinned,
and for a pipeline they are read in the same stages.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from jax.sharding import PartitionSpec

from autopar.analysis.axis_uses import with_axis_uses
from autopar.ir.spec import partition_spec
from autopar.ir.step_graph import EXACT, Exactness, StepGraph
from autopar.layering.layer_options import FollowLayerOption
from autopar.lowering.planned import PlannedStep, scheduled_partition
from autopar.lowering.program_memory import MeshMemory
from autopar.microbatch.exactness import exactness_of
from autopar.pipeline.pipeline_schedules import (
    schedule_kind,
)
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.plan import WHOLE_STEP, MemorySplit, PipelineSchedule, Plan, TimeSplit
from autopar.plan_stages import Stage, Value
from autopar.planning.step_planner import coverage_warnings, stage_of
from autopar.recompute.offloading import offloaded_inputs
from autopar.sharding.options import ShardingOptions
from autopar.sharding.plan_shardings import Shardings, plan_shardings
from autopar.tracing.argument_arrays import named_inputs
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Level, sum_roles

_METHOD = "FollowParallel"


@dataclass(frozen=True, slots=True)
class _InputHome:
    """The place of an input of the followed step.

    Attributes:
        value: the input as the plan places it.
        stage: number of its stage.
    """

    value: Value
    stage: int = 0


def _homes_by_input(planned: PlannedStep) -> dict[int, _InputHome]:
    """Return the places of the inputs of a planned step, by their numbers."""
    homes = {}
    for i, stages in planned.partition.input_stages.items():
        position = planned.graphs[stages[0]].inputs.index(i)
        homes[i] = _InputHome(planned.plan.stages[stages[0]].inputs[position], stages[0])
    return homes


def _find_home(
    path: str, shape: tuple[int, ...], dtype: Any, homes: Sequence[_InputHome]
) -> _InputHome | None:
    """Return the home of an input of another step: one of its shape, dtype and name.

    Names are compared from the end: `0/Dense_0/kernel` is what `0/params/Dense_0/kernel` is in a
    train state. Parameters take precedence over the optimizer's moments of the same name.
    """
    own = path.split("/")[1:]

    def is_same(home: _InputHome) -> bool:
        value = home.value
        if value.role == "batch" or not own or value.path.split("/")[1:][-len(own) :] != own:
            return False
        return (value.shape, value.dtype) == (shape, str(dtype))

    def rank(home: _InputHome) -> tuple[bool, bool, int]:
        other = home.value.path.split("/")[1:]
        return other != own, home.value.role != "parameter", len(other)

    return min(filter(is_same, homes), key=rank, default=None)


def follow(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch: Collection[int],
    num_micro_batches: int,
    followed: PlannedStep,
    cluster: AnyCluster,
    exactness: Exactness = EXACT,
) -> PlannedStep:
    """Plan `fun` in the stages of another step.

    Each equation is placed where the parameters are that it reads. The plan runs forward only. It
    is one program if the followed step is one.

    Args:
        fun: the function to plan, without gradients.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch: numbers of the arguments whose arrays have the batch as their first dim.
        num_micro_batches: number of microbatches; 1 unless the followed step is a pipeline.
        followed: the step to follow, with its plan.
        cluster: the cluster that `followed` is planned for.
        exactness: in what microbatches may differ from the whole batch.

    Raises:
        ValueError: there are several microbatches and the followed step is not a pipeline, or its
            schedule has no counterpart with forwards only.
    """
    homes = list(_homes_by_input(followed).values())
    input_homes = [
        None if is_batch else _find_home(path, aval.shape, aval.dtype, homes)
        for path, aval, is_batch in named_inputs(args, batch)
    ]
    if followed.partition.is_whole_step:
        if num_micro_batches > 1:
            raise ValueError(
                f"num_micro_batches is {num_micro_batches}, but {followed.step.name}, which is"
                " followed, is no pipeline; leave it out"
            )
        schedule = WHOLE_STEP
        step = trace(fun, args, batch)
    else:
        schedule = _forward_schedule(followed, input_homes)
        option = schedule.layer_option
        assert isinstance(option, FollowLayerOption)
        step = trace(
            fun,
            args,
            batch,
            num_micro_batches,
            TraceOptions(layers=option, marked=True, forward=True, exactness=exactness),
        )
    layers = [(s,) for s in range(len(followed.plan.stages))]
    return _follow(step, schedule, followed, layers, input_homes, cluster)


def follow_with_first_pass(followed: PlannedStep, cluster: AnyCluster) -> PlannedStep:
    """Return a step with a plan for its first pass, if it has one.

    The first pass runs in the stages of the step, and reads its inputs where the step does.

    Args:
        followed: the step with its plan, without a plan for its first pass.
        cluster: the cluster that it is planned for.

    Raises:
        ValueError: the schedule of the step has no counterpart with forwards only.
    """
    first = followed.step.first_pass
    if first is None:
        return followed
    step = first.step
    layers = [stage.layers for stage in followed.plan.stages]
    homes = _homes_by_input(followed)
    input_homes = [homes[i] for i in first.reads]
    if followed.partition.is_whole_step:
        schedule = WHOLE_STEP
    else:
        of_state = [None if k in step.batch else home for k, home in enumerate(input_homes)]
        schedule = _schedule_of_first_pass(followed, of_state)
    output_homes = [homes[i] for i in followed.step.completed]
    planned = _follow(step, schedule, followed, layers, input_homes, cluster, output_homes)
    planned = follow_with_first_pass(planned, cluster)
    memory = MeshMemory(followed)
    meshes = range(followed.schedule.pipeline.num_meshes)
    unread = [memory.unread(mesh) for mesh in meshes]
    largest = max(unread, key=lambda level: sum(level.values()))
    return PlannedStep(followed.step, _in_two_passes(followed.plan, planned.plan, largest))


def _in_two_passes(plan: Plan, first: Plan, unread: Level) -> Plan:
    """Return the plan of a step with the plan of its first pass.

    Args:
        plan: the plan of the step alone.
        first: the plan of the first pass.
        unread: bytes of one device of arguments of the step that the first pass does not read.
    """
    times = {
        name: value + getattr(first.predicted_split, name) for name, value in plan.predicted_split
    }
    changes: dict[str, Any] = {
        "first_pass": first,
        "predicted_seconds": plan.predicted_seconds + first.predicted_seconds,
        "predicted_split": TimeSplit(**times),
        "planning_seconds": plan.planning_seconds + first.planning_seconds,
    }
    num_bytes = first.predicted_bytes + sum(unread.values())
    if num_bytes > plan.predicted_bytes:
        roles = sum_roles(cast(Level, dict(first.predicted_memory)), unread)
        changes["predicted_bytes"] = num_bytes
        changes["predicted_memory"] = MemorySplit.of(roles, num_bytes)
    return plan.model_copy(update=changes)


def _follow(
    step: StepGraph,
    schedule: PipelineSchedule,
    followed: PlannedStep,
    layers: Sequence[tuple[int, ...]],
    input_homes: Sequence[_InputHome | None],
    cluster: AnyCluster,
    output_homes: Sequence[_InputHome] = (),
) -> PlannedStep:
    """Plan a traced step in the stages of another one.

    Args:
        step: the step.
        schedule: its schedule.
        followed: the step to follow, with its plan.
        layers: the layers of each stage, if the step is not one program.
        input_homes: where its inputs are; None for inputs that may be anywhere.
        cluster: the cluster that `followed` is planned for.
        output_homes: where its outputs are read; empty if they may be anywhere.
    """
    partition = scheduled_partition(step, schedule, layers)
    solved: list[tuple[Stage, Shardings]] = []
    for graph, stage in zip(stage_graphs(partition), followed.plan.stages, strict=True):
        pool = cluster.pools[cluster.pool_of(stage.devices)]
        pins = _pins(graph, graph.inputs, graph.step.in_paths, input_homes)
        results = [f"result/{path}" for path in graph.step.out_paths]
        if output_homes:
            pins |= _pins(graph, graph.outputs, results, output_homes)
        own = () if partition.is_whole_step else layers[graph.stage]
        solved.append(_solve_stage(graph, stage, own, pins, pool))
    plan = _plan(step, step.num_micro_batches, schedule, solved, cluster)
    return PlannedStep(step, with_axis_uses(step, plan) if partition.is_whole_step else plan)


def _forward_schedule(
    followed: PlannedStep, input_homes: Sequence[_InputHome | None]
) -> PipelineSchedule:
    """Return the schedule of forwards only in the stages of `followed`.

    Its layer option assigns each input to the layer, which is the stage, of its home.
    """
    schedule = followed.plan.schedule
    forward = schedule_kind(schedule.name).forward
    if not forward:
        raise ValueError(
            f"{followed.step.name} runs by schedule {schedule.name!r}, which has no counterpart of"
            " forwards only for steps that follow; pass register_schedule a forward="
        )
    option = _homes_option(followed, input_homes)
    return PipelineSchedule(name=forward, num_chunks=schedule.num_chunks, layer_option=option)


def _schedule_of_first_pass(
    followed: PlannedStep, input_homes: Sequence[_InputHome | None]
) -> PipelineSchedule:
    """Return the schedule of a first pass: the step's, or forwards only without gradients."""
    first, schedule = followed.step.first_pass, followed.plan.schedule
    assert first is not None
    if not first.has_backward:
        return _forward_schedule(followed, input_homes)
    option = _homes_option(followed, input_homes)
    return schedule.model_copy(update={"layer_option": option})


def _homes_option(
    followed: PlannedStep, input_homes: Sequence[_InputHome | None]
) -> FollowLayerOption:
    """Return the option that assigns each input to the layer, which is the stage, of its home."""
    return FollowLayerOption(
        tuple(None if home is None else home.stage for home in input_homes),
        len(followed.plan.stages),
    )


def _plan(
    step: StepGraph,
    num_micro_batches: int,
    schedule: PipelineSchedule,
    solved: Sequence[tuple[Stage, Shardings]],
    cluster: AnyCluster,
) -> Plan:
    """Return the plan with these stages.

    A step takes as long as its first microbatch in all stages and its other ones in the slowest
    stage.
    """
    shardings = [stage_shardings for _, stage_shardings in solved]
    seconds = [stage_shardings.seconds for stage_shardings in shardings]
    slowest = shardings[seconds.index(max(seconds))]
    fullest = max(shardings, key=lambda stage_shardings: stage_shardings.peak_bytes)
    peak_bytes = round(fullest.peak_bytes)
    return Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=_METHOD,
        options=ShardingOptions(),
        cluster=cluster.name,
        num_micro_batches=num_micro_batches,
        stages=tuple(stage for stage, _ in solved),
        schedule=schedule,
        predicted_seconds=(sum(seconds) + (num_micro_batches - 1) * max(seconds))
        / num_micro_batches,
        predicted_split=TimeSplit(**slowest.split._asdict()),
        predicted_bytes=peak_bytes,
        predicted_memory=MemorySplit.of(fullest.roles_at_peak, peak_bytes),
        gap=None,
        planning_seconds=sum(stage_shardings.solve_seconds for stage_shardings in shardings),
        **asdict(exactness_of(step)),
        offloaded=offloaded_inputs(step),
        warnings=coverage_warnings(step),
    )


def _pins(
    graph: StageGraph,
    numbers: Sequence[int],
    paths: Sequence[str],
    homes: Sequence[_InputHome | None],
) -> dict[str, PartitionSpec]:
    """Return the specs of those values of a stage whose homes are there, by path.

    Args:
        graph: the stage.
        numbers: the numbers of the values in the whole step.
        paths: the paths of the values, and perhaps of others after them.
        homes: where the values of the whole step are; fewer than these if others may be anywhere.
    """
    pins: dict[str, PartitionSpec] = {}
    for i, path in zip(numbers, paths, strict=False):
        home = homes[i] if i < len(homes) else None  # the positions of the examples
        if home is not None and home.stage == graph.stage:
            pins[path] = partition_spec(home.value.spec)
    return pins


def _solve_stage(
    graph: StageGraph,
    stage: Stage,
    layers: tuple[int, ...],
    pins: dict[str, PartitionSpec],
    cluster: Cluster,
) -> tuple[Stage, Shardings]:
    """Shard a stage on the mesh of `stage`, some of its values by pins."""
    costs = ClusterCosts(cluster)
    options = ShardingOptions(pins=pins)
    shardings = plan_shardings(graph.step, stage.mesh, costs, options, cluster.device.usable_bytes)
    planned = stage_of(graph.step, stage.mesh, shardings)
    return planned.model_copy(update={"layers": layers, "devices": stage.devices}), shardings
