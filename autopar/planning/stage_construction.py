"""Automatic stage construction for the layers of a step on a cluster.

`stage_problem` states the problem that the dynamic program (`stage_dp`) solves. The costs of a
stage are composed of intra-operator solves of its layers.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from math import inf, isfinite, isinf
from typing import Literal

from autopar.pipeline.pipeline_schedules import has_backward, splits_backward
from autopar.pipeline.stage_graph import StageGraph
from autopar.pipeline.stage_options import (
    Assignment,
    AutoStageOption,
    LogicalSpace,
    PhysicalSpace,
    logical_shapes,
)
from autopar.pipeline.submeshes import HostPool, Submesh, SubmeshSizes, enumerate_submeshes, place
from autopar.planning.composition import ComposedStage
from autopar.planning.layer_costs import Shape
from autopar.planning.layer_ranges import LayerRanges
from autopar.planning.stage_costs import ClusterStageCosts, SolvedStage, StageCosts
from autopar.planning.stage_dp import solve_stages
from autopar.planning.stage_problem import (
    PASSES,
    SCHEDULES_OF_OBJECTIVE,
    InFlight,
    NoStagesError,
    StageCost,
    StageProblem,
    StageSolution,
    in_flight_of,
    with_few_bubbles,
)
from autopar.planning.transfer_costs import TransferCosts
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from simulator.hardware.heterogeneous import AnyCluster

_MAX_HOSTS = 4
"""Most hosts of a submesh in the space "small_power_of_two"."""

_ESTIMATE_MARGIN = 1.01
"""Stages estimated to take longer than this multiple of the best step so far are not solved whole.

A solve is seldom slower than its estimate, and then only slightly.
"""

_SIZES: dict[PhysicalSpace, SubmeshSizes] = {
    "power_of_two": "powers_of_two",
    "small_power_of_two": "powers_of_two",
    "whole_hosts": "whole_hosts",
    "all": "all",
}


@dataclass(frozen=True, slots=True)
class ConstructedStages:
    """The decision of automatic stage construction.

    Attributes:
        forward_stage_layer_ids: layers of each stage.
        submesh_shapes: number of hosts and devices per host of each stage.
        submesh_devices: numbers in the cluster of each stage's devices.
        logical_mesh_shapes: shape of each stage's logical mesh.
        seconds: predicted time of a step.
        num_costs: number of pairs (stage, submesh) whose exact cost was computed.
        num_solves: number of intra-operator solves that these costs took.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_shapes: tuple[tuple[int, int], ...]
    submesh_devices: tuple[tuple[int, ...], ...]
    logical_mesh_shapes: tuple[Shape, ...]
    seconds: float
    num_costs: int
    num_solves: int

    def assignments(self, options: ShardingOptions) -> list[Assignment]:
        """Return the layers, devices and logical mesh of each stage, with its options."""
        stages = zip(
            self.forward_stage_layer_ids,
            self.submesh_devices,
            self.logical_mesh_shapes,
            strict=True,
        )
        return [Assignment(layers, devices, (shape,), options) for layers, devices, shape in stages]


type Measure = Callable[[StageGraph, SolvedStage], SolvedStage]
"""(graph, solved stage) -> the stage with measured seconds."""


def find_stages(
    costs: ClusterStageCosts,
    cluster: AnyCluster,
    option: AutoStageOption,
    schedule: str,
    measure: Measure | None = None,
    solved_seconds: Sequence[float] = (),
    limit: float = inf,
) -> Iterator[ConstructedStages]:
    """Yield the stages with the least time of a step, then even ones that may be faster.

    The objective of the dynamic program leaves out some of the bubbles of stages that differ. So
    the optimum with submeshes of one size in each pool may be faster than the optimum over all of
    them.

    Args:
        costs: costs of stages, of the schedule's kind.
        cluster: where the stages are placed.
        option: submeshes and logical meshes to choose from.
        schedule: name of the pipeline schedule.
        measure: measures stages; by default their time is predicted.
        solved_seconds: times of a step with the stages yielded so far, solved whole. The caller
            appends to it during the iteration.
        limit: seconds of the best step so far; slower stages are not found.

    Raises:
        NoStagesError: no stages fit in memory, or none are faster than the limit.
    """
    problem = stage_problem(costs, cluster, option, schedule, measure, _ESTIMATE_MARGIN * limit)
    solve = solve_stages
    if splits_backward(schedule):
        solve = _solve_few_bubbles
    elif schedule not in SCHEDULES_OF_OBJECTIVE:
        limit = inf  # the step may be faster than the objective
    best = solve(problem, _ESTIMATE_MARGIN * limit)
    yield _constructed(best, problem, costs.num_solves)
    used = {stage.submesh for stage in best.stages}
    if len(used) == 1:
        return
    for submeshes in _even_submeshes(problem):
        if used <= set(submeshes):
            continue  # the optimum over all submeshes
        known = _ESTIMATE_MARGIN * min([*solved_seconds, limit])
        with suppress(NoStagesError):
            even = solve(replace(problem, submeshes=submeshes), known)
            yield _constructed(even, problem, costs.num_solves)


def _solve_few_bubbles(problem: StageProblem, limit: float = inf) -> StageSolution:
    """Return the stages with the least time of a step if bubbles are forward passes alone."""
    solution = solve_stages(with_few_bubbles(problem), PASSES * limit)
    return replace(solution, seconds=solution.seconds / PASSES)


def _even_submeshes(problem: StageProblem) -> Iterable[tuple[Submesh, ...]]:
    """Return every choice of one submesh size for each pool."""
    pools = range(len(problem.pools))
    return product(*([mesh for mesh in problem.submeshes if mesh.pool == i] for i in pools))


def _constructed(
    solution: StageSolution, problem: StageProblem, num_solves: int
) -> ConstructedStages:
    stages = solution.stages
    submeshes = [stage.submesh for stage in stages]
    return ConstructedStages(
        forward_stage_layer_ids=tuple(tuple(range(stage.start, stage.stop)) for stage in stages),
        submesh_shapes=tuple((mesh.hosts, mesh.devices_per_host) for mesh in submeshes),
        submesh_devices=place(problem.pools, submeshes),
        logical_mesh_shapes=tuple(stage.cost.logical_shape for stage in stages),
        seconds=solution.seconds,
        num_costs=solution.num_costs,
        num_solves=num_solves,
    )


def stage_problem(
    costs: ClusterStageCosts,
    cluster: AnyCluster,
    option: AutoStageOption,
    schedule: str,
    measure: Measure | None = None,
    limit: float = inf,
) -> StageProblem:
    """Return the problem that `solve_stages` solves, for the layers of a step on a cluster.

    Args:
        costs: costs of stages, of the schedule's kind.
        cluster: where the stages are placed.
        option: submeshes and logical meshes to choose from.
        schedule: name of the pipeline schedule.
        measure: measures stages; by default their time is predicted.
        limit: seconds of a known step. Stages whose own work takes as long are left out.
    """
    ranges = costs.ranges
    num_micro_batches = ranges.partition.step.num_micro_batches
    pools = tuple(
        HostPool(pool.hosts, pool.devices_per_host, pool_costs.room)
        for pool, pool_costs in zip(cluster.pools, costs.pools, strict=True)
    )
    submeshes = enumerate_submeshes(pools, _SIZES[option.submesh_physical_shape_space])
    if option.submesh_physical_shape_space == "small_power_of_two":
        submeshes = tuple(mesh for mesh in submeshes if mesh.hosts <= _MAX_HOSTS)
    if option.min_stages > 1 and not option.leave_idle:
        submeshes = tuple(mesh for mesh in submeshes if mesh.num_devices < cluster.num_devices)
    in_flight = in_flight_of(schedule, num_micro_batches)
    estimator = _StageEstimator(costs, cluster, option, in_flight, measure, limit=limit)
    return StageProblem(
        num_layers=ranges.num_layers,
        pools=pools,
        submeshes=submeshes,
        num_micro_batches=num_micro_batches,
        costs=estimator.exact,
        in_flight=in_flight,
        lower_bound=None if measure else estimator.lower_bound,
        layer_kinds=ranges.kinds,
        transfer=TransferCosts(pools, ranges.crossing_bytes, costs.links).seconds,
        leave_idle=option.leave_idle,
        min_stages=option.min_stages,
        backward=has_backward(schedule),
        limit=limit,
    )


type Bubbles = Literal["forward", "first", "all"]
"""Which bubbles count: the forward passes of a microbatch on the stages before the slowest, all
passes of the first microbatch, or also those where a stage waits for others."""


def least_seconds(
    costs: ClusterStageCosts,
    cluster: AnyCluster,
    option: AutoStageOption,
    schedule: str,
    num_micro_batches: int,
    *,
    solves: bool,
    bubbles: Bubbles = "all",
    whole_shape: Shape | None = None,
) -> float:
    """Return a lower bound of the time that stage construction finds.

    It is the optimum with lower bounds in place of the costs of stages. With k times as many
    microbatches as the step has, each is taken to do 1 / k of the work of one of the step's.

    Args:
        costs: costs of stages without a split of their backward pass.
        cluster: where the stages are placed.
        option: submeshes to choose from.
        schedule: name of the pipeline schedule.
        num_micro_batches: number of microbatches, at least as many as the step has.
        solves: whether the bound of a stage takes rough solves of its layers (`StageCosts.least`).
            If not, it is the stage's work on one device, divided by its number of devices.
        bubbles: which bubbles of the objective count.
        whole_shape: shape of the logical mesh of all devices if the step is one program on it; None
            for pipelines.

    Raises:
        NoStagesError: no stages fit in memory.
    """
    problem = stage_problem(costs, cluster, option, schedule)
    if whole_shape is not None:
        (pool,) = cluster.pools
        problem = replace(problem, submeshes=(Submesh(0, pool.hosts, pool.devices_per_host),))
    share = problem.num_micro_batches / num_micro_batches
    in_flight = in_flight_of(schedule, num_micro_batches)
    if bubbles == "forward":  # only memory depends on it
        in_flight = _least_in_flight(problem, in_flight)
    estimator = _StageEstimator(costs, cluster, option, in_flight, None, whole_shape)
    crossing_bytes = [share * num_bytes for num_bytes in costs.ranges.crossing_bytes]

    bounds = partial(estimator.least, num_micro_batches)
    problem = replace(
        problem,
        num_micro_batches=num_micro_batches,
        costs=partial(bounds, solves),
        in_flight=in_flight,
        lower_bound=partial(bounds, False) if solves else None,
        transfer=TransferCosts(problem.pools, crossing_bytes, costs.links).seconds,
        backward=problem.backward and bubbles == "all",
    )
    solve = _solve_few_bubbles if bubbles == "forward" else solve_stages
    return solve(problem).seconds


def _least_in_flight(problem: StageProblem, in_flight: InFlight) -> InFlight:
    """Return the least microbatches in flight by position, whatever the number of stages.

    With the same memory for any number of stages, one search finds the bound.
    """
    totals = range(problem.min_stages, problem.max_stages + 1)

    @cache
    def least(later: int) -> int:
        return min(in_flight(later, total) for total in totals if total > later)

    return lambda later, _: least(later)


@dataclass(frozen=True)
class _StageEstimator:
    """Exact costs of stages, and lower bounds of them.

    Attributes:
        option: logical meshes to choose from, and how much the work of stages may differ.
        in_flight: number of microbatches in flight by position of the stage.
        measure: measures stages; None to predict their time.
        whole_shape: see `least_seconds`.
        limit: see `stage_problem`.
    """

    costs: ClusterStageCosts
    cluster: AnyCluster
    option: AutoStageOption
    in_flight: InFlight
    measure: Measure | None
    whole_shape: Shape | None = None
    limit: float = inf

    @property
    def ranges(self) -> LayerRanges:
        return self.costs.ranges

    def exact(self, start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        """Return costs of the stage of layers `start` to `stop` - 1 on `mesh`.

        They are the cheapest shardings that fit with the most microbatches that such a stage may
        hold, with half as many, and so on, until memory is no constraint or there are as few as
        such a stage may hold.
        """
        if not self._is_balanced(start, stop, mesh):
            return []
        pool_costs = self.costs.pools[mesh.pool]
        shapes = self._shapes(mesh)
        least, in_flight = _range_in_flight(self.ranges.kinds, start, stop, self.in_flight)
        stages: list[ComposedStage] = []
        while True:
            if composed := pool_costs.composed(start, stop, shapes, in_flight, self.limit):
                stages.append(composed)
            if in_flight == least or (stages and stages[-1].price == 0):
                break
            in_flight = max(in_flight // 2, least)
        if self.measure is None:
            return [stage.cost for stage in stages]
        measured = (_measured(pool_costs, stage, stop, self.measure) for stage in stages)
        return [cost for cost in measured if cost is not None]

    def lower_bound(self, start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        """Return a cost that no sharding of the stage is below; see `least`."""
        return self.least(self._num_micro_batches, True, start, stop, mesh)

    def least(
        self,
        num_micro_batches: int,
        solves: bool,
        start: int,
        stop: int,
        mesh: Submesh,
    ) -> list[StageCost]:
        """Return a cost that no sharding of a stage is below, for any number of microbatches.

        Its time is the least time of its layers. Its memory is the stage's state and saved
        activations, sharded evenly over all devices, and the rest that one of its layers needs.

        Args:
            num_micro_batches: number of microbatches, at least as many as the step has.
            solves: see `least_seconds`.
            start: first layer.
            stop: the layer after the last one.
            mesh: submesh of the stage.
        """
        if not self._is_balanced(start, stop, mesh):
            return []
        share = self._num_micro_batches / num_micro_batches
        fixed_bytes, saved_bytes = self._even_bytes(start, stop, mesh)
        once_seconds = 0.0
        if solves:
            pool_costs = self.costs.pools[mesh.pool]
            # Shardings that divide the examples of larger microbatches further do not count.
            divided = max(1, num_micro_batches // self._num_micro_batches)
            least = pool_costs.least(start, stop, self._shapes(mesh), divided)
            seconds = least.seconds
            # `step_seconds` bounds all microbatches and the work once per step together. However it
            # is split, all microbatches but the first take at least their share of it.
            rest = least.step_seconds / num_micro_batches - share * seconds
            once_seconds = max(0.0, (num_micro_batches - 1) * rest)
            if least.layer is not None and self.whole_shape is None:
                even_bytes = sum(self._even_bytes(least.layer, least.layer + 1, mesh))
                fixed_bytes += share * max(0.0, least.layer_bytes - even_bytes)
        else:
            seconds = sum(self._layer_work[mesh.pool][start:stop]) / mesh.num_devices
        cost = StageCost(
            share * seconds,
            once_seconds,
            fixed_bytes,
            share * saved_bytes,
            (mesh.num_devices,),
        )
        busy_seconds = (num_micro_batches - 1) * cost.seconds + once_seconds
        return [cost] if busy_seconds < self.limit else []

    @property
    def _num_micro_batches(self) -> int:
        return self.ranges.partition.step.num_micro_batches

    def _shapes(self, mesh: Submesh) -> tuple[Shape, ...]:
        """Return the shapes of logical mesh that a stage on `mesh` may have."""
        if self.whole_shape is not None:
            return (self.whole_shape,)
        return submesh_shapes(mesh, self.option.submesh_logical_shape_space)

    def _even_bytes(self, start: int, stop: int, mesh: Submesh) -> tuple[float, float]:
        """Return a device's share of a stage's state and of the activations of a microbatch."""
        state_bytes = self.ranges.state_bytes(start, stop)
        if self.whole_shape is None:
            saved_bytes = self.ranges.saved_bytes(start, stop)
        else:  # one program computes other values again instead of saving them
            saved_bytes = self.ranges.saved_product_bytes(start, stop)
        return state_bytes / mesh.num_devices, saved_bytes / mesh.num_devices

    @cached_property
    def _layer_work(self) -> list[list[float]]:
        """Seconds of a microbatch that each layer takes on one device, for each pool."""
        layers = range(self.ranges.num_layers)
        return [
            [pool.least(layer, layer + 1, [(1,)]).seconds for layer in layers]
            for pool in self.costs.pools
        ]

    def _is_balanced(self, start: int, stop: int, mesh: Submesh) -> bool:
        """Whether a stage's share of the work is near its devices' share of the cluster's speed."""
        tolerance = self.option.stage_imbalance_tolerance
        if not isfinite(tolerance):
            return True
        totals = [sum(work) for work in self._layer_work]
        if not all(totals):  # nothing costs anything
            return True
        pools = zip(self.cluster.pools, totals, strict=True)
        even_seconds = 1 / sum(pool.num_devices / total for pool, total in pools)
        seconds = sum(self._layer_work[mesh.pool][start:stop]) / mesh.num_devices
        return 1 / (1 + tolerance) <= seconds / even_seconds <= 1 + tolerance


def submesh_shapes(mesh: Submesh, space: LogicalSpace) -> tuple[Shape, ...]:
    """Return the shapes of logical mesh that a submesh may have; see `LogicalSpace`."""
    count = mesh.num_devices
    match space:
        case "data_parallel_only":
            return ((count,),)
        case "same_as_physical":
            return ((count,),) if mesh.hosts == 1 else ((mesh.hosts, mesh.devices_per_host),)
        case "all":
            pairs = [(a, count // a) for a in range(2, count) if count % a == 0]
            return ((count,), *pairs)
        case "single_node_model_parallel":
            if mesh.hosts == 1:
                return logical_shapes(count)
            inner = [
                n for n in range(mesh.devices_per_host, 1, -1) if mesh.devices_per_host % n == 0
            ]
            return ((count,), *((count // n, n) for n in inner))


def _measured(
    costs: StageCosts, composed: ComposedStage, stop: int, measure: Measure
) -> StageCost | None:
    """Return the cost of a stage that is solved whole and measured; None if it does not run."""
    graph = costs.ranges.graph(composed.start, stop)
    layers = range(composed.start, stop)
    try:
        solved = measure(graph, costs.cheapest(graph, layers, [composed.mesh_choice.shape], 1))
    except (ShardingError, InfeasibleError):
        return None
    if isinf(solved.fixed_bytes):
        return None
    return replace(composed.cost, seconds=solved.seconds, once_seconds=solved.once_seconds)


def _range_in_flight(
    kinds: Sequence[Hashable], start: int, stop: int, in_flight: InFlight
) -> tuple[int, int]:
    """Return the least and most microbatches that a stage with layers of these kinds holds.

    Args:
        kinds: kind of each layer of the step.
        start: first layer of a stage.
        stop: the layer after its last one. Stages of the same kinds elsewhere count as well.
        in_flight: number of microbatches in flight by position.
    """
    num_layers, length = len(kinds), stop - start
    starts = [
        first
        for first in range(num_layers - length + 1)
        if kinds[first : first + length] == kinds[start:stop]
    ]
    held = [
        in_flight(later, earlier + 1 + later)
        for first in starts
        for later in range(num_layers - first - length + 1)
        for earlier in range(first + 1)
        if (later > 0) == (first + length < num_layers) and (earlier > 0) == (first > 0)
    ]
    return min(held), max(held)
