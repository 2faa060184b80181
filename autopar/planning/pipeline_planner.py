"""Planning a pipeline: which layers form a stage, which devices it gets, and how it is sharded over them."""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jax.extend.core import Var

from autopar._cpython import builds_graphs
from autopar.devices import Device, logical_mesh
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.layering.layers import num_layers
from autopar.pipeline.partition import Partition
from autopar.pipeline.partitioner import partition_step
from autopar.pipeline.pipeline_schedules import Pipeline, Schedule, make_schedule, splits_backward
from autopar.pipeline.stage_graph import StageGraph, stage_graphs
from autopar.pipeline.stage_options import (
    Assignment,
    AutoStageOption,
    LogicalSpace,
    StageError,
    StageOption,
)
from autopar.plan import MemorySplit, PipelineSchedule, Plan, Stage, TimeSplit
from autopar.planning.layer_costs import LayerCosts
from autopar.planning.layer_ranges import LayerRanges
from autopar.planning.profiling import StageProfiler
from autopar.planning.stage_construction import (
    ConstructedStages,
    find_stages,
    remember,
    transfer_seconds,
)
from autopar.planning.stage_costs import ClusterStageCosts, SolvedStage, StageCosts
from autopar.planning.step_planner import coverage_warnings, stage_of
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import check_patterns
from autopar.sharding.planner import MemoryBudgetError
from simulator.costs.cost_model import CostModel, costs_of
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Role, added, apportioned

TOLERANCE = 0.01
"""How far from the cheapest sharding a stage may be, relative: proving the rest takes most of the time."""


@dataclass(frozen=True, slots=True)
class _Solved:
    """Stages with their shardings, and what a step of all of them takes."""

    assigned: Sequence[Assignment]
    graphs: list[StageGraph]
    solved: list[SolvedStage]
    seconds: float
    held: Mapping[Role, int]


class PipelinePlanner:
    """Plans pipelines for a step, traced in layers and marked, on the devices of a cluster.

    What it finds out about layers for one schedule, or one way to form stages, it knows for all others.

    Args:
        memory_budget: bytes of one device, of any pool, that the step may use; by default each device's memory less its reserve.
        costs: what work costs, on any device; by default what the cluster implies, in each of its pools.
        devices: where stages are measured, if they are; all that are here by default.

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
    ) -> None:
        self.step, self.cluster, self.options, self.devices = step, cluster, options, devices
        self.budgets = [
            pool.device.usable_bytes if memory_budget is None else memory_budget
            for pool in cluster.pools
        ]
        known = costs_of(cluster)
        self.costs: CostModel = costs or known
        self.pool_costs: Sequence[CostModel] = [costs] * len(known.pools) if costs else known.pools
        self.num_layers = num_layers(step.jaxpr)
        if self.num_layers == 0:
            raise StageError(
                "the step has no layers: decorate the loss function with autopar.manual_layer_construction or"
                " autopar.automatic_layer_construction, or give the method a layer_option, and differentiate with autopar.grad"
            )
        check_patterns(options.pins, step)
        self._ranges: dict[bool, LayerRanges] = {}
        self._layers: dict[Hashable, list[LayerCosts]] = {}
        self._stages: dict[Hashable, ClusterStageCosts] = {}
        self._profilers: dict[str | Path | None, StageProfiler] = {}

    @builds_graphs
    def plan(self, stage_option: StageOption, schedule: PipelineSchedule, method: str) -> Plan:
        """The cheapest plan with that schedule.

        Raises:
            StageError: the layers can't be put on the devices, or measured there, as asked.
            NoStagesError: no stages that were tried fit on the devices.
            MemoryBudgetError: a stage does not fit.
        """
        start, step = time.perf_counter(), self.step
        if isinstance(stage_option, AutoStageOption):
            found = self._found(stage_option, schedule)
        else:
            chunks = schedule.num_chunks

            def placement(num_meshes: int) -> list[int]:
                tasks = make_schedule(
                    schedule.name, Pipeline(num_meshes, step.num_micro_batches, chunks)
                )
                return [tasks.mesh_of(stage) for stage in range(num_meshes * chunks)]

            assigned = stage_option.assign(
                self.num_layers, self.cluster.num_devices, self.options, chunks, placement
            )
            found = self._solved(assigned, schedule, None)
        solved = found.solved
        stages = [_stage(*each) for each in zip(found.graphs, found.assigned, solved, strict=True)]
        slowest = max(solved, key=lambda each: each.seconds).shardings
        return Plan(
            step=step.name,
            fingerprint=step.fingerprint,
            method=method,
            options=self.options,
            cluster=self.cluster.name,
            num_micro_batches=step.num_micro_batches,
            stages=tuple(stages),
            schedule=schedule,
            predicted_seconds=found.seconds,
            predicted_split=TimeSplit(**slowest.split._asdict()),
            predicted_bytes=sum(found.held.values()),
            predicted_memory=MemorySplit(**found.held),
            gap=max(
                (each.shardings.gap for each in solved if each.shardings.gap is not None),
                default=None,
            ),
            planning_seconds=time.perf_counter() - start,
            warnings=(
                *dict.fromkeys(w for each in solved for w in each.shardings.warnings),
                *coverage_warnings(step),
            ),
        )

    def _found(self, option: AutoStageOption, schedule: PipelineSchedule) -> _Solved:
        """The fastest of the stages that are found; anew as long as some turn out not to run, or not to fit."""
        if schedule.num_chunks > 1:
            raise StageError(
                f"{schedule.num_chunks} chunks: stages are found for one stage on each submesh; use a UniformStageOption, of"
                " which `search` tries all"
            )
        costs = self._stage_costs(
            _limited(self.options, option.submesh_logical_shape_space), schedule
        )
        measure = self._profiler(option)
        while True:
            before, known = costs.revisions, []
            solved: list[tuple[_Solved, ConstructedStages]] = []
            for facts, assigned in find_stages(
                costs, self.cluster, option, schedule.name, measure, known
            ):
                try:
                    solved.append((self._solved(assigned, schedule, measure), facts))
                except MemoryBudgetError:
                    if costs.revisions == before:
                        raise
                else:
                    known.append(solved[-1][0].seconds)
            if costs.revisions == before:
                break
        best, facts = min(solved, key=lambda each: each[0].seconds)
        remember(facts)
        return best

    def _solved(
        self,
        assigned: Sequence[Assignment],
        schedule: PipelineSchedule,
        measure: StageProfiler | None,
    ) -> _Solved:
        """Stages on their devices, each solved whole."""
        pipeline = Pipeline(
            len(assigned) // schedule.num_chunks, self.step.num_micro_batches, schedule.num_chunks
        )
        tasks = make_schedule(schedule.name, pipeline)
        of_layers = [s for s, each in enumerate(assigned) for _ in each.layers]
        partition = partition_step(self.step, of_layers, splits_backward(schedule.name))
        graphs, in_flight = stage_graphs(partition), tasks.in_flight()
        pools = [self._pool(stage, each) for stage, each in enumerate(assigned)]
        costs = [
            self._stage_costs(each.options, schedule).pools[pool]
            for each, pool in zip(assigned, pools, strict=True)
        ]
        solved = [
            mine.cheapest(graph, each.layers, each.shapes, in_flight[graph.stage])
            for mine, graph, each in zip(costs, graphs, assigned, strict=True)
        ]
        timed = [measure(*each) for each in zip(graphs, solved, strict=True)] if measure else solved
        seconds = _makespan(tasks, partition, timed, assigned, self.costs)
        return _Solved(assigned, graphs, solved, seconds, _fullest(tasks, solved, in_flight))

    def _pool(self, stage: int, assigned: Assignment) -> int:
        try:
            return self.cluster.pool_of(assigned.devices)
        except ClusterError as error:
            raise StageError(
                f"stage {stage}: {error}; use an AutoStageOption, or a ManualStageOption with submesh shapes, or"
                " submesh_devices, that keep to one pool"
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
        """Costs of stages within `options`, for what the schedule leaves of the memory to each."""
        options = replace(
            options, tolerance=max(options.tolerance, TOLERANCE)
        )  # many stages are solved
        split = splits_backward(schedule.name)
        key = split, repr(options)
        if split not in self._ranges:
            self._ranges[split] = LayerRanges(self.step, self.num_layers, split)
        if key not in self._layers:
            self._layers[key] = [LayerCosts(costs, options) for costs in self.pool_costs]
        if (schedule.num_chunks, key) not in self._stages:
            pools = tuple(
                StageCosts(self._ranges[split], layers, options, budget / schedule.num_chunks)
                for layers, budget in zip(self._layers[key], self.budgets, strict=True)
            )
            self._stages[schedule.num_chunks, key] = ClusterStageCosts(pools, self.costs)
        return self._stages[schedule.num_chunks, key]


def make_pipeline_plan(
    step: StepGraph,
    cluster: AnyCluster,
    stage_option: StageOption,
    options: ShardingOptions,
    schedule: PipelineSchedule,
    method: str,
    memory_budget: float | None = None,
    costs: CostModel | None = None,
) -> Plan:
    """The cheapest plan for a step with one schedule; see `PipelinePlanner`."""
    return PipelinePlanner(step, cluster, options, memory_budget, costs).plan(
        stage_option, schedule, method
    )


def _limited(options: ShardingOptions, space: LogicalSpace) -> ShardingOptions:
    return replace(options, batch_axis="x") if space == "data_parallel_only" else options


def _stage(graph: StageGraph, assigned: Assignment, solved: SolvedStage) -> Stage:
    stage = stage_of(graph.step, logical_mesh(solved.shape), solved.shardings)
    return stage.model_copy(update={"layers": assigned.layers, "devices": assigned.devices})


def _fullest(
    schedule: Schedule, solved: Sequence[SolvedStage], in_flight: Sequence[int]
) -> Mapping[Role, int]:
    """What the fullest device needs, if every stage on it is fullest at the same time."""
    used: dict[int, dict[Role, int]] = defaultdict(dict)
    for stage, each in enumerate(solved):
        held = apportioned(
            each.shardings.roles_at_peak, round(each.bytes(in_flight[stage])), "activations"
        )
        mesh = schedule.mesh_of(stage)
        used[mesh] = added(used[mesh], held)
    return max(used.values(), key=lambda held: sum(held.values()))


def _makespan(
    schedule: Schedule,
    partition: Partition,
    solved: Sequence[SolvedStage],
    assigned: Sequence[Assignment],
    costs: CostModel,
) -> float:
    """Seconds of a step: what its schedule takes with these stages and the transfers between them."""
    sent: set[tuple[Var, int, int]] = (
        set()
    )  # a value is sent to a stage once, whatever reads it there
    for task, reads in partition.reads.items():
        for var in reads if task.phase != "U" else ():
            maker = partition.producers.get(var)
            if maker is not None and maker.phase != "U" and abs(maker.stage - task.stage) == 1:
                sent.add((var, maker.stage, task.stage))
    moved = Counter()
    for var, source, to in sent:
        moved[source, to] += array_bytes(aval_of(var).shape, aval_of(var).dtype)
    transfers: dict[tuple[int, int], float] = {}
    for (source, to), num_bytes in moved.items():
        seconds = transfer_seconds(costs, num_bytes, assigned[source].devices, assigned[to].devices)
        meshes = schedule.mesh_of(source), schedule.mesh_of(to)
        transfers[meshes] = max(seconds, transfers.get(meshes, 0.0))
    return schedule.makespan(
        lambda task: solved[task.stage].phases.get(task.phase, 0.0),
        lambda source, to: transfers.get((source, to), 0.0),
    )
