"""Automatic stage construction: the exact dynamic program over stages, with costs from the intra-operator solve of each."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite

from jax.extend.core import Var

from autopar.graph import aval_of
from autopar.pipeline.layer_ranges import LayerRanges
from autopar.pipeline.stage_costs import Shape, SolvedStage, StageSolver
from autopar.pipeline.stage_options import Assignment, AutoStageOption, LogicalSpace, PhysicalSpace, logical_shapes
from autopar.pipeline.stage_search import construct_stages
from autopar.pipeline.stages import InFlight, StageCost, StagePlan, StageProblem, in_flight_of
from autopar.pipeline.submeshes import HostPool, Submesh, SubmeshSizes, enumerate_submeshes, place
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.problem import InfeasibleError
from autopar.work import array_bytes
from simulator.cluster import Cluster
from simulator.costs import CostModel

_MOST_HOSTS = 4
"""Of a submesh in the space "small_power_of_two"."""

_ROUGHLY = 0.5
"""How far from the cheapest the shardings may be that bounds are made of: what was proven of the cheapest counts."""

_SIZES: dict[PhysicalSpace, SubmeshSizes] = {
    "power_of_two": "powers_of_two",
    "small_power_of_two": "powers_of_two",
    "whole_hosts": "whole_hosts",
    "all": "all",
}


@dataclass(frozen=True, slots=True)
class FoundStages:
    """What automatic stage construction decided.

    Attributes:
        forward_stage_layer_ids: the layers of each stage; submesh_shapes: its hosts and devices of each; logical_mesh_shapes: the
            mesh that they are seen as.
        seconds: predicted time of a step.
        num_costs: how many (stage, submesh) were priced exactly; num_solves: how many intra-operator solves that took.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_shapes: tuple[tuple[int, int], ...]
    logical_mesh_shapes: tuple[Shape, ...]
    seconds: float
    num_costs: int
    num_solves: int


_last: list[FoundStages] = []


def get_last_dp_result() -> FoundStages | None:
    """What automatic stage construction decided last in this process."""
    return _last[-1] if _last else None


type Measure = Callable[..., SolvedStage]
"""(graph, solved stage) -> the stage with measured seconds."""


def find_stages(
    problem: StageProblem, solver: StageSolver, option: AutoStageOption, options: ShardingOptions
) -> list[Assignment]:
    """The stages with the least predicted time of a step; `solver` is the one that `problem` asks.

    Raises:
        NoStagesError: none fit.
    """
    found = construct_stages(problem)
    shapes = [(stage.submesh.hosts, stage.submesh.devices_per_host) for stage in found.stages]
    _last[:] = [
        FoundStages(
            forward_stage_layer_ids=tuple(tuple(range(stage.start, stage.stop)) for stage in found.stages),
            submesh_shapes=tuple(shapes),
            logical_mesh_shapes=tuple(stage.cost.logical_shape for stage in found.stages),
            seconds=found.seconds,
            num_costs=found.num_costs,
            num_solves=solver.num_solves,
        )
    ]
    return _assignments(found, problem.pools, option, options)


def _assignments(
    found: StagePlan, pools: Sequence[HostPool], option: AutoStageOption, options: ShardingOptions
) -> list[Assignment]:
    devices = place(pools, [stage.submesh for stage in found.stages])
    limits = _limited(options, option.submesh_logical_shape_space)
    return [
        Assignment(tuple(range(stage.start, stage.stop)), mine, (stage.cost.logical_shape,), limits)
        for stage, mine in zip(found.stages, devices, strict=True)
    ]


def stage_problem(
    ranges: LayerRanges,
    solver: StageSolver,
    cluster: Cluster,
    option: AutoStageOption,
    options: ShardingOptions,
    schedule: str,
    measure: Measure | None = None,
) -> StageProblem:
    """The problem that `construct_stages` solves, for the layers of a step on a cluster."""
    count = ranges.cut.step.num_micro_batches
    in_flight = in_flight_of(schedule, count)
    limits = _limited(options, option.submesh_logical_shape_space)
    pool = HostPool(cluster.hosts, cluster.devices_per_host, solver.budget)
    submeshes = enumerate_submeshes([pool], _SIZES[option.submesh_physical_shape_space])
    if option.submesh_physical_shape_space == "small_power_of_two":
        submeshes = tuple(mesh for mesh in submeshes if mesh.hosts <= _MOST_HOSTS)
    balanced = _balance(ranges, solver, cluster, option.stage_imbalance_tolerance)

    def shapes(mesh: Submesh) -> tuple[Shape, ...]:
        return submesh_shapes(mesh, option.submesh_logical_shape_space)

    def costs(start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        if not balanced(start, stop, mesh):
            return []
        graph, most = ranges.graph(start, stop), _most_in_flight(ranges.kinds, start, stop, in_flight)
        solved: list[SolvedStage] = []
        for bound in sorted(lower_bound(start, stop, mesh), key=lambda bound: bound.seconds):
            fit = [each for each in solved if each.bytes(most) <= solver.budget]
            least = count * bound.seconds + bound.once_seconds
            if not any(count * each.seconds + each.once_seconds <= least for each in fit):
                solved += solver.variants(graph, bound.logical_shape, limits, most)
        return [_cost(measure(graph, each) if measure else each) for each in solved]

    roughly = replace(limits, tolerance=max(limits.tolerance, _ROUGHLY))

    @cache
    def single(kind: int, mesh: Submesh) -> dict[Shape, SolvedStage]:
        """A layer alone on each shape; roughly on those that are proven to be dearer than another one."""
        found: dict[Shape, SolvedStage] = {}
        for shape in shapes(mesh):
            with suppress(ShardingError, InfeasibleError):
                found[shape] = solver.cheapest(ranges.layers[kind], shape, roughly)
        least = min((count * each.seconds + each.once_seconds for each in found.values()), default=0.0)
        for shape, each in found.items():
            open_ = each.bound * (count * each.seconds + each.once_seconds) <= least
            if open_ and (each.shardings.gap or 0.0) > limits.tolerance:
                found[shape] = solver.cheapest(ranges.layers[kind], shape, limits)
        return found

    first_of = {kind: layer for layer, kind in reversed([*enumerate(ranges.kinds)])}
    alike = [first_of[kind] for kind in ranges.kinds]
    state = [_state_bytes(ranges, layer) for layer in range(ranges.num_layers)]
    held = [_held_bytes(ranges, layer) for layer in range(ranges.num_layers)]

    def lower_bound(start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        """The layers apart, each as it is best; all that a stage keeps cut evenly."""
        if not balanced(start, stop, mesh):
            return []
        kept: dict[Var, int] = {}
        for layer in range(start, stop):
            kept.update(state[layer])
        bounds = []
        for shape in shapes(mesh):
            parts = [single(alike[layer], mesh).get(shape) for layer in range(start, stop)]
            if all(parts):
                bounds.append(
                    StageCost(
                        sum(part.seconds * part.bound for part in parts if part),
                        sum(part.once_seconds * part.bound for part in parts if part),
                        sum(kept.values()) / mesh.num_devices,
                        held[start] / mesh.num_devices,
                        shape,
                    )
                )
        return bounds

    @cache
    def transfer(cut: int, source: Submesh, destination: Submesh) -> float:
        first = 0 if cluster.hosts == 1 else source.hosts * cluster.devices_per_host
        start = source.num_devices if cluster.hosts == 1 else first
        if start + destination.num_devices > cluster.num_devices:
            return inf
        devices = range(start, start + destination.num_devices)
        return transfer_seconds(solver.costs, ranges.crossing_bytes[cut], range(source.num_devices), devices)

    return StageProblem(
        num_layers=ranges.num_layers,
        pools=(pool,),
        submeshes=submeshes,
        num_micro_batches=count,
        costs=costs,
        in_flight=in_flight,
        lower_bound=None if measure else lower_bound,
        layer_kinds=ranges.kinds,
        transfer=transfer,
        leave_idle=option.leave_idle,
    )


def transfer_seconds(costs: CostModel, num_bytes: float, source: Sequence[int], destination: Sequence[int]) -> float:
    """Seconds to move bytes from some devices to others, each sending its share to one of them (what then is missing on other devices
    they gather from one another, which is not counted)."""
    pairs = tuple((a, b) for a, b in zip(source, destination, strict=False))
    return costs.collective("permute", num_bytes / len(pairs), pairs) if num_bytes else 0.0


def submesh_shapes(mesh: Submesh, space: LogicalSpace) -> tuple[Shape, ...]:
    """The meshes that a submesh can be seen as."""
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
            inner = [n for n in range(mesh.devices_per_host, 1, -1) if mesh.devices_per_host % n == 0]
            return ((count,), *((count // n, n) for n in inner))


def _limited(options: ShardingOptions, space: LogicalSpace) -> ShardingOptions:
    return replace(options, batch_axis="x") if space == "data_parallel_only" else options


def _cost(solved: SolvedStage) -> StageCost:
    return StageCost(solved.seconds, solved.once_seconds, solved.fixed_bytes, solved.micro_batch_bytes, solved.shape)


def _most_in_flight(kinds: Sequence[Hashable], start: int, stop: int, in_flight: InFlight) -> int:
    """The most microbatches that a stage with layers of these kinds may hold, wherever it is."""
    layers, length = len(kinds), stop - start
    places = [first for first in range(layers - length + 1) if kinds[first : first + length] == kinds[start:stop]]
    return max(
        in_flight(later, earlier + 1 + later)
        for first in places
        for later in range(layers - first - length + 1)
        for earlier in range(first + 1)
        if (later > 0) == (first + length < layers) and (earlier > 0) == (first > 0)
    )


def _state_bytes(ranges: LayerRanges, layer: int) -> dict[Var, int]:
    """What stays on a layer's devices: carried inputs, and what microbatches add up to."""
    step = ranges.layers[layer].step
    assert step.microbatching is not None
    kept = [step.jaxpr.invars[i] for i in step.carried.values()]
    kept += [var for _, mark in step.microbatching.marks for var in mark.outvars]
    return {var: array_bytes(aval_of(var).shape, aval_of(var).dtype) for var in kept}


def _held_bytes(ranges: LayerRanges, layer: int) -> int:
    """What a layer receives and keeps until its backward pass, whatever its stage looks like."""
    step = ranges.layers[layer].step
    received = {step.jaxpr.invars[i] for i in step.received}
    return sum(array_bytes(aval_of(v).shape, aval_of(v).dtype) for v in step.held if v in received)


def _balance(
    ranges: LayerRanges, solver: StageSolver, cluster: Cluster, tolerance: float
) -> Callable[[int, int, Submesh], bool]:
    """Whether a stage's share of the work is near its share of the devices."""
    if not isfinite(tolerance):
        return lambda start, stop, mesh: True
    work = [solver.cheapest(graph, (1,)).seconds for graph in ranges.layers]

    def balanced(start: int, stop: int, mesh: Submesh) -> bool:
        share = sum(work[start:stop]) / sum(work) / (mesh.num_devices / cluster.num_devices)
        return 1 / (1 + tolerance) <= share <= 1 + tolerance

    return balanced
