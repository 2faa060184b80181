"""Planning a pipeline: which layers form a stage, which devices it gets, and how it is sharded over them."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.devices import Device, logical_mesh
from autopar.garbage import paused_gc
from autopar.graph import aval_of
from autopar.pipeline.cut import Cut
from autopar.pipeline.cutting import cut_step
from autopar.pipeline.layer_ranges import LayerRanges
from autopar.pipeline.planned import num_layers
from autopar.pipeline.profiling import StageProfiler
from autopar.pipeline.schedules import Pipeline, Schedule, make_schedule
from autopar.pipeline.stage_construction import find_stages, transfer_seconds
from autopar.pipeline.stage_costs import SolvedStage, StageCosts
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.pipeline.stage_options import Assignment, AutoStageOption, LogicalSpace, StageError, StageOption
from autopar.plan import PipelineSchedule, Plan, Stage, TimeSplit
from autopar.planning import coverage_warnings, stage_of
from autopar.sharding.options import ShardingOptions
from autopar.sharding.planner import MemoryBudgetError
from autopar.trace import StepGraph
from autopar.work import array_bytes
from simulator.cluster import Cluster
from simulator.costs import ClusterCosts, CostModel

TOLERANCE = 0.01
"""How far from the cheapest sharding a stage may be, relative: proving the rest takes most of the time."""


class _Known:
    """What stages cost, within the options that each is given."""

    def __init__(self, ranges: LayerRanges, costs: CostModel, budget: float) -> None:
        self._make = lambda options: StageCosts(ranges, costs, options, budget)
        self._costs: dict[str, StageCosts] = {}
        self._start = time.perf_counter()

    def within(self, options: ShardingOptions) -> StageCosts:
        options = replace(options, tolerance=max(options.tolerance, TOLERANCE))  # many stages are solved
        return self._costs.setdefault(repr(options), self._make(options))

    @property
    def revisions(self) -> int:
        return sum(costs.revisions for costs in self._costs.values())

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


@paused_gc()
def make_pipeline_plan(
    step: StepGraph,
    cluster: Cluster,
    stage_option: StageOption,
    options: ShardingOptions,
    schedule: PipelineSchedule,
    method: str,
    memory_budget: float | None = None,
    costs: CostModel | None = None,
    devices: Sequence[Device] | None = None,
) -> Plan:
    """The cheapest plan for `step`, traced in layers and marked, on the devices of `cluster`.

    Args:
        devices: where stages are measured, if the option asks for it; all that are here by default.

    Raises:
        StageError: the step has no layers, or they can't be put on the devices, or measured there, as asked.
        NoStagesError: no stages that were tried fit on the devices.
        MemoryBudgetError: a stage does not fit.
    """
    layers = num_layers(step)
    if layers == 0:
        raise StageError(
            "the step has no layers: decorate the loss function with autopar.manual_layer_construction or"
            " autopar.automatic_layer_construction, or give the method a layer_option, and differentiate with autopar.grad"
        )
    budget = cluster.device.usable_bytes if memory_budget is None else memory_budget
    costs = costs or ClusterCosts(cluster)
    split_backward = schedule.name == "zero_bubble_h1"
    known = _Known(LayerRanges(step, layers, split_backward), costs, budget / schedule.num_chunks)
    automatic = isinstance(stage_option, AutoStageOption)
    if automatic and schedule.num_chunks > 1:
        raise StageError(
            f"{schedule.num_chunks} chunks: stages are found for one stage on each submesh; use a UniformStageOption"
        )
    measure = None
    if isinstance(stage_option, AutoStageOption) and stage_option.profile:
        measure = StageProfiler(cluster, devices, stage_option.cached_profile_result)
    while True:
        if isinstance(stage_option, AutoStageOption):
            found = known.within(_limited(options, stage_option.submesh_logical_shape_space))
            assigned = find_stages(found, cluster, stage_option, schedule.name, measure)
        else:
            assigned = stage_option.assign(layers, cluster.num_devices, options, schedule.num_chunks)
        pipeline = Pipeline(len(assigned) // schedule.num_chunks, step.num_micro_batches, schedule.num_chunks)
        tasks = make_schedule(schedule.name, pipeline)
        cut = cut_step(step, [s for s, each in enumerate(assigned) for _ in each.layers], split_backward)
        graphs, in_flight, before = stage_graphs(cut), _in_flight(tasks), known.revisions
        try:
            solved = [
                known.within(each.options).cheapest(graph, each.layers, each.shapes, in_flight[graph.stage])
                for graph, each in zip(graphs, assigned, strict=True)
            ]
        except MemoryBudgetError:
            if not automatic or known.revisions == before:
                raise
        else:
            if not automatic or known.revisions == before:
                break
    stages = [_stage(*each) for each in zip(graphs, assigned, solved, strict=True)]
    timed = [measure(*each) for each in zip(graphs, solved, strict=True)] if measure else solved
    slowest = max(solved, key=lambda each: each.seconds).shardings
    return Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=method,
        options=options,
        cluster=cluster.name,
        num_micro_batches=step.num_micro_batches,
        stages=tuple(stages),
        pipeline=schedule,
        predicted_seconds=_makespan(tasks, cut, timed, assigned, costs),
        predicted_split=TimeSplit(**slowest.split._asdict()),
        predicted_bytes=round(_peak_bytes(tasks, solved, in_flight)),
        gap=max((each.shardings.gap for each in solved if each.shardings.gap is not None), default=None),
        planning_seconds=known.seconds,
        warnings=(*dict.fromkeys(w for each in solved for w in each.shardings.warnings), *coverage_warnings(step)),
    )


def _limited(options: ShardingOptions, space: LogicalSpace) -> ShardingOptions:
    return replace(options, batch_axis="x") if space == "data_parallel_only" else options


def _stage(graph: StageGraph, assigned: Assignment, solved: SolvedStage) -> Stage:
    stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
    return stage.model_copy(update={"layers": assigned.layers, "devices": assigned.devices})


def _in_flight(schedule: Schedule) -> list[int]:
    """For each stage, of how many microbatches it holds activations at most."""
    release = "W" if "W" in schedule.phases else "B"
    held, most = Counter(), Counter()
    for row in schedule.rows:
        for task in row:
            held[task.stage] += (task.phase == "F") - (task.phase == release)
            most[task.stage] = max(most[task.stage], held[task.stage])
    if release not in schedule.phases:  # nothing is kept
        return [1] * schedule.pipeline.num_stages
    return [most[stage] for stage in range(schedule.pipeline.num_stages)]


def _peak_bytes(schedule: Schedule, solved: Sequence[SolvedStage], in_flight: Sequence[int]) -> float:
    """What the fullest device needs, if every stage on it is fullest at the same time."""
    used: dict[int, float] = defaultdict(float)
    for stage, each in enumerate(solved):
        used[schedule.pipeline.mesh_of(stage)] += each.bytes(in_flight[stage])
    return max(used.values())


def _makespan(
    schedule: Schedule, cut: Cut, solved: Sequence[SolvedStage], assigned: Sequence[Assignment], costs: CostModel
) -> float:
    """Seconds of a step: what its schedule takes with these stages and the transfers between them."""
    moved = Counter()
    for task, reads in cut.reads.items():
        for var in reads if task.phase != "U" else ():
            maker = cut.made_by.get(var)
            if maker is not None and maker.phase != "U" and abs(maker.stage - task.stage) == 1:
                moved[maker.stage, task.stage] += array_bytes(aval_of(var).shape, aval_of(var).dtype)
    transfers: dict[tuple[int, int], float] = {}
    for (source, to), num_bytes in moved.items():
        seconds = transfer_seconds(costs, num_bytes, assigned[source].devices, assigned[to].devices)
        meshes = schedule.pipeline.mesh_of(source), schedule.pipeline.mesh_of(to)
        transfers[meshes] = max(seconds, transfers.get(meshes, 0.0))
    return schedule.makespan(
        lambda task: solved[task.stage].phases.get(task.phase, 0.0),
        lambda source, to: transfers.get((source, to), 0.0),
    )
