"""Automatic stage construction: the exact dynamic program over stages, with costs composed of intra-operator solves of layers."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import inf, isfinite, isinf

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.pipeline.pipeline_schedules import has_backward
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
from autopar.planning.stage_dp import construct_stages
from autopar.planning.stage_problem import (
    InFlight,
    NoStagesError,
    StageCost,
    StageProblem,
    StageSolution,
    in_flight_of,
)
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from simulator.costs.cost_model import CostModel
from simulator.hardware.heterogeneous import AnyCluster

_MOST_HOSTS = 4
"""Of a submesh in the space "small_power_of_two"."""

_SURE = 1.01
"""Stages whose estimated time is so many times what others take are not worth a closer look: it is seldom above theirs, and then a
little."""

_SIZES: dict[PhysicalSpace, SubmeshSizes] = {
    "power_of_two": "powers_of_two",
    "small_power_of_two": "powers_of_two",
    "whole_hosts": "whole_hosts",
    "all": "all",
}


@dataclass(frozen=True, slots=True)
class ConstructedStages:
    """What automatic stage construction decided.

    Attributes:
        forward_stage_layer_ids: the layers of each stage; submesh_shapes: its hosts and devices of each; submesh_devices: their
            numbers in the cluster; logical_mesh_shapes: the mesh that they are seen as.
        seconds: predicted time of a step.
        num_costs: how many (stage, submesh) were priced exactly; num_solves: how many intra-operator solves that took.
    """

    forward_stage_layer_ids: tuple[tuple[int, ...], ...]
    submesh_shapes: tuple[tuple[int, int], ...]
    submesh_devices: tuple[tuple[int, ...], ...]
    logical_mesh_shapes: tuple[Shape, ...]
    seconds: float
    num_costs: int
    num_solves: int


_last: list[ConstructedStages] = []


def get_last_dp_result() -> ConstructedStages | None:
    """What automatic stage construction decided last in this process."""
    return _last[-1] if _last else None


def remember(found: ConstructedStages) -> None:
    """Have `get_last_dp_result` tell of these."""
    _last[:] = [found]


type Measure = Callable[[StageGraph, SolvedStage], SolvedStage]
"""(graph, solved stage) -> the stage with measured seconds."""


def find_stages(
    costs: ClusterStageCosts,
    cluster: AnyCluster,
    option: AutoStageOption,
    schedule: str,
    measure: Measure | None = None,
    known: Sequence[float] = (),
) -> Iterator[tuple[ConstructedStages, list[Assignment]]]:
    """The stages with the least predicted, or measured, time of a step, and then those on submeshes of one size (in each pool) that
    may be faster.

    What the dynamic program minimises leaves out some of the bubbles of stages that differ, so that even ones may be faster.

    Args:
        known: seconds of a step with the stages so far, looked at closely; it grows while this goes on.

    Raises:
        NoStagesError: none fit.
    """
    problem = stage_problem(costs, cluster, option, schedule, measure)
    best = construct_stages(problem)
    yield _found(best, problem, costs)
    used = {stage.submesh for stage in best.stages}
    for meshes in _even(problem) if len(used) > 1 else ():
        if used <= set(meshes):
            continue  # that is the one which was found
        with suppress(NoStagesError):
            yield _found(
                construct_stages(
                    replace(problem, submeshes=meshes), _SURE * min(known, default=inf)
                ),
                problem,
                costs,
            )


def _even(problem: StageProblem) -> Iterable[tuple[Submesh, ...]]:
    """Submeshes of one size in each pool."""
    return product(
        *([mesh for mesh in problem.submeshes if mesh.pool == i] for i in range(len(problem.pools)))
    )


def _found(
    found: StageSolution, problem: StageProblem, costs: ClusterStageCosts
) -> tuple[ConstructedStages, list[Assignment]]:
    facts = _facts(found, problem, costs.num_solves)
    return facts, _assigned(facts, costs.options)


def _facts(found: StageSolution, problem: StageProblem, num_solves: int) -> ConstructedStages:
    submeshes = [stage.submesh for stage in found.stages]
    return ConstructedStages(
        forward_stage_layer_ids=tuple(
            tuple(range(stage.start, stage.stop)) for stage in found.stages
        ),
        submesh_shapes=tuple((mesh.hosts, mesh.devices_per_host) for mesh in submeshes),
        submesh_devices=place(problem.pools, submeshes),
        logical_mesh_shapes=tuple(stage.cost.logical_shape for stage in found.stages),
        seconds=found.seconds,
        num_costs=found.num_costs,
        num_solves=num_solves,
    )


def _assigned(found: ConstructedStages, options: ShardingOptions) -> list[Assignment]:
    return [
        Assignment(layers, devices, (shape,), options)
        for layers, devices, shape in zip(
            found.forward_stage_layer_ids,
            found.submesh_devices,
            found.logical_mesh_shapes,
            strict=True,
        )
    ]


def stage_problem(
    costs: ClusterStageCosts,
    cluster: AnyCluster,
    option: AutoStageOption,
    schedule: str,
    measure: Measure | None = None,
) -> StageProblem:
    """The problem that `construct_stages` solves, for the layers of a step on a cluster."""
    ranges = costs.ranges
    count = ranges.partition.step.num_micro_batches
    in_flight = in_flight_of(schedule, count)
    pools = tuple(
        HostPool(pool.hosts, pool.devices_per_host, each.room)
        for pool, each in zip(cluster.pools, costs.pools, strict=True)
    )
    submeshes = enumerate_submeshes(pools, _SIZES[option.submesh_physical_shape_space])
    if option.submesh_physical_shape_space == "small_power_of_two":
        submeshes = tuple(mesh for mesh in submeshes if mesh.hosts <= _MOST_HOSTS)
    balanced = _balance(costs, cluster, option.stage_imbalance_tolerance)

    def exact(start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        """The cheapest sharding for every number of microbatches in flight that halves the one before."""
        here = costs.pools[mesh.pool]
        found: list[ComposedStage] = []
        in_flight_here = (
            _most_in_flight(ranges.kinds, start, stop, in_flight)
            if balanced(start, stop, mesh)
            else 0
        )
        shapes = submesh_shapes(mesh, option.submesh_logical_shape_space)
        while in_flight_here and not (found and found[-1].price == 0):
            if composed := here.composed(start, stop, shapes, in_flight_here):
                found.append(composed)
            in_flight_here //= 2
        if measure:
            return [cost for each in found for cost in _measured(here, each, stop, measure)]
        return [each.cost for each in found]

    state = [_state_bytes(ranges, layer) for layer in range(ranges.num_layers)]
    held = [_held_bytes(ranges, layer) for layer in range(ranges.num_layers)]

    def lower_bound(start: int, stop: int, mesh: Submesh) -> list[StageCost]:
        """What layers take at least, and all that a stage keeps cut evenly."""
        if not balanced(start, stop, mesh):
            return []
        kept: dict[Var, int] = {}
        for layer in range(start, stop):
            kept.update(state[layer])
        shapes = submesh_shapes(mesh, option.submesh_logical_shape_space)
        seconds, of_step = costs.pools[mesh.pool].least(start, stop, shapes)
        # what happens once per step is not told apart: whatever it is, all microbatches but the first take their share
        once = max(0.0, (count - 1) * (of_step / count - seconds))
        size = mesh.num_devices
        return [StageCost(seconds, once, sum(kept.values()) / size, held[start] / size)]

    starts = [0, *accumulate(pool.num_devices for pool in pools)]

    @cache
    def transfer(cut: int, source: Submesh, destination: Submesh, before: int | None) -> float:
        """One stage after the other, as `place` puts those of one size; at best in one host, if it has room for both.

        Stages in different pools are taken to be at the start of their pool, wherever they are: the network between pools is the
        same from everywhere.
        """
        taken, given = source.num_devices, destination.num_devices
        if source.pool != destination.pool:
            first, second = starts[source.pool], starts[destination.pool]
        else:
            pool = pools[source.pool]
            if before is None:
                host = pool.devices_per_host
                before = taken if taken + given <= host else -(-taken // host) * host
            if before < taken or before + given > pool.num_devices:
                return inf
            first, second = starts[source.pool] + before - taken, starts[source.pool] + before
        num_bytes = ranges.crossing_bytes[cut]
        return transfer_seconds(
            costs.links, num_bytes, range(first, first + taken), range(second, second + given)
        )

    return StageProblem(
        num_layers=ranges.num_layers,
        pools=pools,
        submeshes=submeshes,
        num_micro_batches=count,
        costs=exact,
        in_flight=in_flight,
        lower_bound=None if measure else lower_bound,
        layer_kinds=ranges.kinds,
        transfer=transfer,
        leave_idle=option.leave_idle,
        backward=has_backward(schedule),
    )


def transfer_seconds(
    costs: CostModel, num_bytes: float, source: Sequence[int], destination: Sequence[int]
) -> float:
    """Seconds to move bytes from some devices to others, each sending its share to one of them (what then is missing on other devices
    they gather from one another, which is not counted)."""
    pairs = tuple((a, b) for a, b in zip(source, destination, strict=False))
    return (
        costs.collective("collective_permute", num_bytes / len(pairs), pairs) if num_bytes else 0.0
    )


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
            inner = [
                n for n in range(mesh.devices_per_host, 1, -1) if mesh.devices_per_host % n == 0
            ]
            return ((count,), *((count // n, n) for n in inner))


def _measured(
    costs: StageCosts, composed: ComposedStage, stop: int, measure: Measure
) -> list[StageCost]:
    """What a stage costs that was solved whole and measured; nothing if it does not run."""
    graph, layers = costs.ranges.graph(composed.start, stop), range(composed.start, stop)
    try:
        solved = measure(graph, costs.cheapest(graph, layers, [composed.mesh_choice.shape], 1))
    except (ShardingError, InfeasibleError):
        return []
    if isinf(solved.fixed_bytes):
        return []
    return [replace(composed.cost, seconds=solved.seconds, once_seconds=solved.once_seconds)]


def _most_in_flight(kinds: Sequence[Hashable], start: int, stop: int, in_flight: InFlight) -> int:
    """The most microbatches that a stage with layers of these kinds may hold, wherever it is."""
    layers, length = len(kinds), stop - start
    places = [
        first
        for first in range(layers - length + 1)
        if kinds[first : first + length] == kinds[start:stop]
    ]
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
    costs: ClusterStageCosts, cluster: AnyCluster, tolerance: float
) -> Callable[[int, int, Submesh], bool]:
    """Whether a stage's share of the work is near its devices' share of what all devices can do in the same time."""
    if not isfinite(tolerance):
        return lambda start, stop, mesh: True
    layers = range(costs.ranges.num_layers)
    work = [[pool.least(layer, layer + 1, [(1,)])[0] for layer in layers] for pool in costs.pools]
    if not all(map(sum, work)):  # nothing costs anything
        return lambda start, stop, mesh: True
    even = 1 / sum(
        pool.num_devices / sum(mine) for pool, mine in zip(cluster.pools, work, strict=True)
    )

    def balanced(start: int, stop: int, mesh: Submesh) -> bool:
        share = sum(work[mesh.pool][start:stop]) / mesh.num_devices / even
        return 1 / (1 + tolerance) <= share <= 1 + tolerance

    return balanced
