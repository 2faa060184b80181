"""Planning of pipelines: layers and devices of each stage, and its sharding over the devices."""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Literal

from jax.extend.core import Var

from autopar._cpython import builds_graphs
from autopar.devices import Device, logical_mesh
from autopar.ir.array_sizes import value_bytes
from autopar.ir.control_flow import OPENING
from autopar.ir.graph import source_line
from autopar.ir.step_graph import StepGraph
from autopar.layering.layer_scopes import num_layers
from autopar.layering.scan_layers import LAYERS_IN_LOOPS
from autopar.microbatch.exactness import exactness_of
from autopar.pipeline.partition import Partition
from autopar.pipeline.partitioner import partition_step
from autopar.pipeline.pipeline_schedules import Schedule, make_schedule, splits_backward
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.pipeline.stage_options import (
    Assignment,
    AutoStageOption,
    LogicalSpace,
    StageError,
    StageOption,
)
from autopar.plan import MemorySplit, PipelineSchedule, Plan, TimeSplit
from autopar.plan_stages import Stage
from autopar.planning.chunked_stages import least_chunked_seconds
from autopar.planning.last_results import record_stages
from autopar.planning.layer_costs import LayerCosts, Shape
from autopar.planning.layer_ranges import LayerRanges
from autopar.planning.profiling import StageProfiler
from autopar.planning.stage_construction import (
    ConstructedStages,
    find_stages,
    least_seconds,
)
from autopar.planning.stage_costs import ClusterStageCosts, SolvedStage, StageCosts
from autopar.planning.stage_problem import NoStagesError
from autopar.planning.step_planner import coverage_warnings, stage_of
from autopar.planning.transfer_costs import transfer_seconds
from autopar.primitives import is_product
from autopar.progress import progress_part
from autopar.recompute.offloading import offloaded_inputs
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import check_patterns
from autopar.sharding.solve_within_memory import MemoryBudgetError
from simulator.costs.cost_model import CostModel, costs_of
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Role, apportion, sum_roles

TOLERANCE = 0.01
"""Relative gap to the cheapest sharding at which a stage counts as solved.

Proving the rest takes most of the time.
"""


type BoundEffort = Literal["work", "stages", "solves"]
"""What a lower bound of the seconds of a step takes: the work of its layers on one device, or in
stages on several devices, or rough solves of the layers of these stages."""

BOUND_EFFORTS: Sequence[BoundEffort] = ("work", "stages", "solves")
"""From the least effort to the closest bound."""


@dataclass(frozen=True, slots=True)
class _SolvedPipeline:
    """Stages on their devices with their shardings.

    Attributes:
        assignments: layers and devices of each stage.
        graphs: each stage as a step.
        stages: sharding and costs of each stage.
        seconds: predicted time of a step.
        memory: bytes of the fullest device by role.
    """

    assignments: Sequence[Assignment]
    graphs: list[StageGraph]
    stages: list[SolvedStage]
    seconds: float
    memory: Mapping[Role, int]


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
        shardings = [stage.shardings for stage in pipeline.stages]
        slowest = max(pipeline.stages, key=lambda stage: stage.seconds).shardings
        gaps = [sharding.gap for sharding in shardings if sharding.gap is not None]
        warnings = dict.fromkeys(text for sharding in shardings for text in sharding.warnings)
        return Plan(
            step=self.step.name,
            fingerprint=self.step.fingerprint,
            method=method,
            options=self.options,
            cluster=self.cluster.name,
            num_micro_batches=self.step.num_micro_batches,
            stages=tuple(
                _plan_stage(graph, assignment, stage)
                for graph, assignment, stage in zip(
                    pipeline.graphs, pipeline.assignments, pipeline.stages, strict=True
                )
            ),
            schedule=schedule,
            predicted_seconds=pipeline.seconds,
            predicted_split=TimeSplit(**slowest.split._asdict()),
            predicted_bytes=sum(pipeline.memory.values()),
            predicted_memory=MemorySplit(**pipeline.memory),
            gap=max(gaps, default=None),
            planning_seconds=time.perf_counter() - start,
            memory_limited=any(sharding.memory_limited for sharding in shardings),
            **asdict(exactness_of(self.step)),
            offloaded=offloaded_inputs(self.step),
            warnings=(
                *warnings,
                *_light_stage_warnings(pipeline.graphs),
                *coverage_warnings(self.step),
            ),
        )

    def bound(
        self,
        stage_option: StageOption,
        schedule: PipelineSchedule,
        num_micro_batches: int,
        whole_shape: Shape | None = None,
        effort: BoundEffort = "solves",
    ) -> float:
        """Return a lower bound of the predicted seconds of all plans with these options.

        Args:
            stage_option: layers and devices of the stages, given or to be found.
            schedule: pipeline schedule with its number of chunks; `WHOLE_STEP` for one program.
            num_micro_batches: number of microbatches, at least that of the step. Smaller
                microbatches are taken to need as much work for an example.
            whole_shape: shape of the logical mesh of one program; None for pipelines.
            effort: how close the bound of automatic stages is.

        Returns:
            Seconds; infinite if no stages fit in memory.
        """
        is_auto = isinstance(stage_option, AutoStageOption)
        if is_auto and stage_option.profile and schedule.num_chunks == 1:
            return 0.0  # measured times have no bound
        if not is_auto or effort == "work":
            return self.step.num_micro_batches * self._even_seconds
        is_whole = whole_shape is not None
        if schedule.num_chunks > 1:
            return least_chunked_seconds(
                self._stage_costs(self.options, PipelineSchedule(name="1f1b")),
                self.cluster.num_devices,
                schedule,
                num_micro_batches,
                solves=effort == "solves",
            )
        if is_whole:
            stage_option = replace(stage_option, min_stages=1)
        options = _limited(self.options, stage_option.submesh_logical_shape_space)
        try:
            return least_seconds(
                self._stage_costs(options, PipelineSchedule(name="1f1b")),
                self.cluster,
                stage_option,
                "1f1b" if is_whole else schedule.name,
                num_micro_batches,
                solves=effort == "solves",
                # Other schedules may have fewer bubbles than the objective counts.
                has_bubbles=is_whole or schedule.name in _SCHEDULES_OF_OBJECTIVE,
                whole_shape=whole_shape,
            )
        except NoStagesError:
            return inf

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
    ) -> _SolvedPipeline:
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
        if measure or schedule.name not in _SCHEDULES_OF_OBJECTIVE:
            limit = inf  # the step may be faster than the objective
        while True:
            revisions = costs.revisions
            pipelines: list[tuple[_SolvedPipeline, ConstructedStages]] = []
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
    ) -> _SolvedPipeline:
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
        seconds = _makespan(tasks, partition, timed, assignments, self.costs)
        memory = _fullest_device(tasks, stages)
        return _SolvedPipeline(assignments, graphs, stages, seconds, memory)

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


_SCHEDULES_OF_OBJECTIVE = ("gpipe", "1f1b", "1f1b_overlap_friendly")
"""Schedules whose bubbles the objective of stage construction describes."""

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


def _light_stage_warnings(graphs: Sequence[StageGraph]) -> tuple[str, ...]:
    """Return a warning if stages have no matrix product or convolution before the update."""
    light = [number for number, graph in enumerate(graphs) if not _has_product(graph)]
    if not light or len(light) == len(graphs):
        return ()
    listed = ", ".join(map(str, light))
    lines = dict.fromkeys(line for graph in graphs for line in _lines_of_loops(graph))
    loops = f"; each loop is in one layer, at {', '.join(lines)}: {LAYERS_IN_LOOPS}"
    return (
        f"stages without a matrix product or convolution: {listed} of {len(graphs)}; their devices"
        f" do little, so fewer layers and stages are faster{loops if lines else ''}",
    )


def _lines_of_loops(graph: StageGraph) -> list[str]:
    """Return the lines of the loops in the forward tasks of a stage that has a product."""
    if not _has_product(graph):
        return []
    return [
        source_line(eqn)
        for task, eqns in graph.tasks.items()
        if task.phase == "F"
        for _, eqn in eqns
        if eqn.primitive in OPENING
    ]


def _has_product(graph: StageGraph) -> bool:
    return any(
        is_product(eqn)
        for task, eqns in graph.tasks.items()
        if task.phase != "U"
        for _, eqn in eqns
    )


def _plan_stage(graph: StageGraph, assignment: Assignment, solved: SolvedStage) -> Stage:
    stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
    return stage.model_copy(update={"layers": assignment.layers, "devices": assignment.devices})


def _fullest_device(schedule: Schedule, stages: Sequence[SolvedStage]) -> Mapping[Role, int]:
    """Return the bytes of the fullest device by role, if its stages peak at the same time."""
    memory: dict[int, dict[Role, int]] = defaultdict(dict)
    for number, stage in enumerate(stages):
        num_bytes = round(stage.scheduled_bytes(schedule.waiting(number)))
        roles = apportion(stage.shardings.roles_at_peak, num_bytes, "activations")
        mesh = schedule.mesh_of(number)
        memory[mesh] = sum_roles(memory[mesh], roles)
    return max(memory.values(), key=lambda roles: sum(roles.values()))


def _makespan(
    schedule: Schedule,
    partition: Partition,
    stages: Sequence[SolvedStage],
    assignments: Sequence[Assignment],
    costs: CostModel,
) -> float:
    """Return the predicted seconds of a step, with the transfers between neighbouring stages."""
    transfers: dict[tuple[int, int], float] = {}
    for (source, destination), num_bytes in _crossing_bytes(partition).items():
        seconds = transfer_seconds(
            costs, num_bytes, assignments[source].devices, assignments[destination].devices
        )
        meshes = schedule.mesh_of(source), schedule.mesh_of(destination)
        transfers[meshes] = max(seconds, transfers.get(meshes, 0.0))
    return schedule.makespan(
        lambda task: stages[task.stage].phases.get(task.phase, 0.0),
        lambda source, destination: transfers.get((source, destination), 0.0),
    )


def _crossing_bytes(partition: Partition) -> Counter[tuple[int, int]]:
    """Return the bytes of one microbatch between neighbouring stages, by source and destination.

    A value is sent to a stage once, however many of its tasks read it.
    """
    crossings: set[tuple[Var, int, int]] = set()
    for task, reads in partition.reads.items():
        if task.phase == "U":
            continue
        for var in reads:
            producer = partition.producers.get(var)
            if producer is None or producer.phase == "U":
                continue
            if abs(producer.stage - task.stage) == 1:
                crossings.add((var, producer.stage, task.stage))
    num_bytes: Counter[tuple[int, int]] = Counter()
    for var, source, destination in crossings:
        num_bytes[source, destination] += value_bytes(var)
    return num_bytes
