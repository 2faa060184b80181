"""Planning of pipelines: layers and devices of each stage, and its sharding over the devices."""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Literal

from autopar._cpython import builds_graphs
from autopar.devices import Device
from autopar.ir.step_graph import StepGraph
from autopar.layering.layer_scopes import num_layers
from autopar.pipeline.partitioner import partition_step
from autopar.pipeline.pipeline_schedules import make_schedule, splits_backward
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.stage_graph import stage_graphs
from autopar.pipeline.stage_options import (
    Assignment,
    AutoStageOption,
    LogicalSpace,
    StageError,
    StageOption,
)
from autopar.plan import PipelineSchedule, Plan
from autopar.planning.chunked_stages import least_chunked_seconds
from autopar.planning.last_results import record_stages
from autopar.planning.layer_costs import LayerCosts, Shape
from autopar.planning.layer_ranges import LayerRanges
from autopar.planning.profiling import StageProfiler
from autopar.planning.solved_pipelines import SolvedPipeline, fullest_device, makespan
from autopar.planning.stage_construction import (
    Bubbles,
    ConstructedStages,
    find_stages,
    least_seconds,
)
from autopar.planning.stage_costs import ClusterStageCosts, SolvedStage, StageCosts
from autopar.planning.stage_problem import NO_MEMORY, SCHEDULES_OF_OBJECTIVE, NoStagesError
from autopar.progress import progress_part
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import check_patterns
from autopar.sharding.solve_within_memory import MemoryBudgetError
from simulator.costs.cost_model import CostModel, costs_of
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster

TOLERANCE = 0.01
"""Relative gap to the cheapest sharding at which a stage counts as solved.

Proving the rest takes most of the time.
"""


type BoundEffort = Literal["work", "stages", "solves", "schedule", "memory"]
"""What a lower bound of the seconds of a step is computed from.

"work" takes the work of its layers on one device, "stages" their work in stages on several devices,
and "solves" rough solves of the layers of these stages. Schedules with the same objective share
these bounds; "schedule" is the bound of one of them. "memory" takes solves of layers with a price
of memory, which only one program has.
"""

BOUND_EFFORTS: Sequence[BoundEffort] = ("work", "stages", "solves", "schedule", "memory")
"""From the least effort to the closest bound."""


class PipelinePlanner:
    """Plans pipelines for one step on one cluster.

    Costs of layers are cached: plans for other schedules and other stages of the same step reuse
    them.

    Args:
        step: the step, traced in layers and with its accumulated values marked.
        cluster: the cluster to plan for.
        options: limits on shardings.
        memory_budget: bytes of one device, of any pool, that the step may use; by default each
            device's memory less its reserve.
        costs: costs of work on any device; by default the costs that the cluster implies for each
            of its pools.
        devices: devices to measure stages on, for `AutoStageOption(profile=True)`; by default all
            devices of this process.
        room: bytes that stages may need by the estimates of automatic stage construction, divided
            by the budget. The stages that it chooses are solved within the budget.

    Raises:
        StageError: the step has no layers.
    """

    def __init__(
        self,
        step: StepGraph,
        cluster: AnyCluster,
        options: ShardingOptions = AUTO,
        memory_budget: float | None = None,
        costs: CostModel | None = None,
        devices: Sequence[Device] | None = None,
        room: float = 1.0,
    ) -> None:
        self.step = step
        self.cluster = cluster
        self.options = options
        self.devices = devices
        self.room = room
        self.budgets = [
            pool.device.usable_bytes if memory_budget is None else memory_budget
            for pool in cluster.pools
        ]
        cluster_costs = costs_of(cluster)
        self.costs: CostModel = costs or cluster_costs
        self.pool_costs: Sequence[CostModel] = (
            [costs] * len(cluster.pools) if costs else cluster_costs.pools
        )
        self.num_layers = num_layers(step.jaxpr)
        if self.num_layers == 0:
            raise StageError(
                "the step has no layers: give the method a layer_option, such as"
                " autopar.AutoLayerOption(layer_num=8), or decorate the loss function with"
                " autopar.manual_layer_construction or autopar.automatic_layer_construction"
            )
        check_patterns(options.pins, step)
        self._ranges: dict[bool, LayerRanges] = {}
        self._layer_costs: dict[Hashable, list[LayerCosts]] = {}
        self._cluster_costs: dict[Hashable, ClusterStageCosts] = {}
        self._bounds: dict[Hashable, float | str] = {}
        self._profilers: dict[str | Path | None, StageProfiler] = {}

    @builds_graphs
    def plan(
        self,
        stage_option: StageOption,
        schedule: PipelineSchedule,
        method: str,
        limit: float = inf,
    ) -> Plan:
        """Return the plan with the least predicted time of a step.

        Args:
            stage_option: layers and devices of the stages, given or to be found.
            schedule: pipeline schedule with its number of chunks.
            method: name of the method, for the plan.
            limit: seconds of the best plan so far; automatic stages that are slower need not be
                found.

        Raises:
            StageError: the layers cannot be placed on the devices, or measured, as requested.
            NoStagesError: no stages that were tried fit on the devices, or are below the limit.
            MemoryBudgetError: a stage does not fit.
        """
        start = time.perf_counter()
        if isinstance(stage_option, AutoStageOption):
            pipeline = self._construct(stage_option, schedule, limit)
        else:
            assignments = stage_option.assign(
                self.num_layers,
                self.cluster.num_devices,
                self.options,
                schedule.num_chunks,
                partial(self._meshes_of_stages, schedule),
            )
            pipeline = self._solve(assignments, schedule, None)
        return pipeline.plan(
            self.step,
            options=self.options,
            cluster=self.cluster.name,
            schedule=schedule,
            method=method,
            planning_seconds=time.perf_counter() - start,
        )

    def bound(
        self,
        stage_option: StageOption,
        schedule: PipelineSchedule,
        num_micro_batches: int,
        whole_shape: Shape | None = None,
        effort: BoundEffort = "solves",
        limit: float = inf,
    ) -> float:
        """Return a lower bound of the predicted seconds of a step, of all plans with these options.

        Args:
            stage_option: layers and devices of the stages, given or to be found.
            schedule: pipeline schedule with its number of chunks; `WHOLE_STEP` for one program.
            num_micro_batches: number of microbatches, at least that of the step. Smaller
                microbatches are taken to need as much work for an example.
            whole_shape: shape of the logical mesh of one program; None for pipelines.
            effort: how close the bound of automatic stages is.
            limit: bound from which on no closer one is looked for.

        Raises:
            StageError: there are too few layers or devices.
            ScheduleError: the schedule needs more microbatches.
            NoStagesError: no stages fit in memory.
        """
        is_auto = isinstance(stage_option, AutoStageOption)
        if is_auto and stage_option.profile and schedule.num_chunks == 1:
            return 0.0  # measured times have no bound
        if not is_auto or effort == "work":
            return self.step.num_micro_batches * self._even_seconds
        is_whole = whole_shape is not None
        if effort == "memory":
            return self._bound_as_program(whole_shape, num_micro_batches, limit)
        is_alike = schedule.name in SCHEDULES_OF_OBJECTIVE
        if effort == "schedule" and (is_whole or not is_alike):
            return 0.0
        if schedule.num_chunks > 1:
            return least_chunked_seconds(
                self._stage_costs(self.options, PipelineSchedule(name="1f1b")),
                self.cluster.num_devices,
                schedule,
                num_micro_batches,
                solves=effort == "solves",
            )
        if is_whole:
            return self._least_seconds(
                replace(stage_option, min_stages=1), "1f1b", num_micro_batches, effort, whole_shape
            )
        # Of the schedules with the same objective, 1f1b needs the least memory.
        name = "1f1b" if is_alike and effort != "schedule" else schedule.name
        return self._least_seconds(stage_option, name, num_micro_batches, effort)

    def _least_seconds(
        self,
        stage_option: AutoStageOption,
        schedule: str,
        num_micro_batches: int,
        effort: BoundEffort,
        whole_shape: Shape | None = None,
    ) -> float:
        """Return the bound of automatic stages; see `bound`. It, or its error, is computed once."""
        key = repr(stage_option), schedule, num_micro_batches, effort, whole_shape
        if key not in self._bounds:
            options = _limited(self.options, stage_option.submesh_logical_shape_space)
            bubbles: Bubbles = "first" if schedule in SCHEDULES_OF_OBJECTIVE else "forward"
            if effort == "schedule" or whole_shape:
                bubbles = "all"
            try:
                self._bounds[key] = least_seconds(
                    self._stage_costs(options, PipelineSchedule(name="1f1b")),
                    self.cluster,
                    stage_option,
                    schedule,
                    num_micro_batches,
                    solves=effort != "stages",
                    bubbles=bubbles,
                    whole_shape=whole_shape,
                )
            except NoStagesError as error:
                self._bounds[key] = NO_MEMORY if whole_shape else str(error)
        bound = self._bounds[key]
        if isinstance(bound, str):
            raise NoStagesError(bound)
        return bound

    def _bound_as_program(self, shape: Shape | None, num_micro_batches: int, limit: float) -> float:
        if shape is None:
            return 0.0
        (pool,) = self._stage_costs(self.options, PipelineSchedule(name="1f1b")).pools
        bound = pool.least_as_program(shape, num_micro_batches, limit)
        if bound == inf:
            raise NoStagesError(NO_MEMORY)
        return bound

    @cached_property
    def _even_seconds(self) -> float:
        """Seconds of a microbatch if all devices share the work of all layers evenly."""
        costs = self._stage_costs(self.options, PipelineSchedule(name="1f1b"))
        totals = [pool.least(0, self.num_layers, [(1,)]).seconds for pool in costs.pools]
        if not all(totals):  # nothing costs anything
            return 0.0
        pools = zip(self.cluster.pools, totals, strict=True)
        return 1 / sum(pool.num_devices / total for pool, total in pools)

    def _meshes_of_stages(self, schedule: PipelineSchedule, num_meshes: int) -> list[int]:
        """Return the mesh of each stage of a pipeline of `num_meshes` meshes."""
        chunks = schedule.num_chunks
        pipeline = Pipeline(num_meshes, self.step.num_micro_batches, chunks)
        tasks = make_schedule(schedule.name, pipeline)
        return [tasks.mesh_of(stage) for stage in range(num_meshes * chunks)]

    def _construct(
        self, option: AutoStageOption, schedule: PipelineSchedule, limit: float
    ) -> SolvedPipeline:
        """Return the fastest pipeline of automatic stage construction.

        Stage construction starts again with corrected costs as long as some of its stages do not
        run, or do not fit, when they are solved whole.
        """
        if schedule.num_chunks > 1:
            raise StageError(
                f"{schedule.num_chunks} chunks: automatic stages are one on each submesh; use a"
                " UniformStageOption"
            )
        options = _limited(self.options, option.submesh_logical_shape_space)
        costs = self._stage_costs(options, schedule)
        measure = self._profiler(option)
        if measure:
            limit = inf  # measured stages may be faster than their predictions
        while True:
            revisions = costs.revisions
            pipelines: list[tuple[SolvedPipeline, ConstructedStages]] = []
            seconds: list[float] = []
            found = find_stages(costs, self.cluster, option, schedule.name, measure, seconds, limit)
            for stages in _uncounted(found):
                try:
                    with progress_part(_CONSTRUCTION, 1):
                        pipeline = self._solve(stages.assignments(costs.options), schedule, measure)
                except MemoryBudgetError:
                    if costs.revisions == revisions:
                        raise
                else:
                    pipelines.append((pipeline, stages))
                    seconds.append(pipeline.seconds)
            if costs.revisions == revisions:
                break
        best, stages = min(pipelines, key=lambda pair: pair[0].seconds)
        record_stages(stages)
        return best

    def _solve(
        self,
        assignments: Sequence[Assignment],
        schedule: PipelineSchedule,
        measure: StageProfiler | None,
    ) -> SolvedPipeline:
        """Solve each stage whole, on its devices and with its microbatches in flight."""
        num_meshes = len(assignments) // schedule.num_chunks
        pipeline = Pipeline(num_meshes, self.step.num_micro_batches, schedule.num_chunks)
        tasks = make_schedule(schedule.name, pipeline)
        in_flight = tasks.in_flight()
        stage_of_layer = [
            stage for stage, assignment in enumerate(assignments) for _ in assignment.layers
        ]
        partition = partition_step(self.step, stage_of_layer, splits_backward(schedule.name))
        graphs = stage_graphs(partition)
        pools = [self._pool(stage, assignment) for stage, assignment in enumerate(assignments)]
        solved: dict[int, SolvedStage] = {}
        # Stages with more microbatches in flight often take the solution of those with fewer.
        for k in sorted(range(len(graphs)), key=lambda stage: in_flight[stage]):
            assignment = assignments[k]
            costs = self._stage_costs(assignment.options, schedule).pools[pools[k]]
            layers, shapes = assignment.layers, assignment.shapes
            done = len(solved) / len(graphs)
            with progress_part(done, done + 1 / len(graphs), f"stage {k}"):
                solved[k] = costs.cheapest(graphs[k], layers, shapes, in_flight[k])
        stages = [solved[k] for k in range(len(graphs))]
        timed = stages
        if measure:
            timed = [measure(graph, stage) for graph, stage in zip(graphs, stages, strict=True)]
        seconds = makespan(tasks, partition, timed, assignments, self.costs)
        memory = fullest_device(tasks, stages)
        return SolvedPipeline(assignments, graphs, stages, seconds, memory)

    def _pool(self, stage: int, assignment: Assignment) -> int:
        try:
            return self.cluster.pool_of(assignment.devices)
        except ClusterError as error:
            raise StageError(
                f"stage {stage}: {error}; use an AutoStageOption, or a ManualStageOption with"
                " submesh shapes, or submesh_devices, that keep to one pool"
            ) from None

    def _profiler(self, option: AutoStageOption) -> StageProfiler | None:
        if not option.profile:
            return None
        file = option.cached_profile_result
        if file not in self._profilers:
            self._profilers[file] = StageProfiler(self.cluster, self.devices, file)
        return self._profilers[file]

    def _stage_costs(
        self, options: ShardingOptions, schedule: PipelineSchedule
    ) -> ClusterStageCosts:
        """Return the costs of stages within `options`.

        Each of the `schedule.num_chunks` stages on a device may use an equal share of its memory.
        """
        # Many stages are solved, so none is solved to the last percent.
        options = replace(options, tolerance=max(options.tolerance, TOLERANCE))
        is_split = splits_backward(schedule.name)
        layers_key = is_split, repr(options)
        if layers_key not in self._layer_costs:
            self._layer_costs[layers_key] = [
                LayerCosts(costs, options) for costs in self.pool_costs
            ]
        key = schedule.num_chunks, layers_key
        if key not in self._cluster_costs:
            ranges = self._layer_ranges(is_split)
            pools = tuple(
                StageCosts(ranges, layers, options, budget, self.room * budget)
                for layers, budget in zip(
                    self._layer_costs[layers_key],
                    (budget / schedule.num_chunks for budget in self.budgets),
                    strict=True,
                )
            )
            self._cluster_costs[key] = ClusterStageCosts(pools, self.costs)
        return self._cluster_costs[key]

    def _layer_ranges(self, is_split: bool) -> LayerRanges:
        """Return the layers, with their backward pass in one piece or split."""
        if is_split not in self._ranges:
            self._ranges[is_split] = LayerRanges(self.step, self.num_layers, is_split)
        return self._ranges[is_split]


_CONSTRUCTION = 0.7
"""Usual share of stage construction in the time of planning a pipeline, the solves aside."""


def _uncounted(found: Iterator[ConstructedStages]) -> Iterator[ConstructedStages]:
    """Yield what is found; the number of solves of layers on the way is unknown beforehand."""
    while True:
        with progress_part(0, 0, "stages"):
            stages = next(found, None)
        if stages is None:
            return
        yield stages


def _limited(options: ShardingOptions, space: LogicalSpace) -> ShardingOptions:
    return replace(options, batch_axis="x") if space == "data_parallel_only" else options
