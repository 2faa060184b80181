"""What stages cost: composed of what their layers cost, and solved whole for those that are taken.

The layers of a stage share its memory. Each gives the hull of its shardings (`layer_costs`); they move along their hulls, the one
that pays the least per byte first, until the stage fits. That is the Lagrangian relaxation of the stage's own problem, and its
bound proves how good the sharding is that is made of the layers' ones.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf, prod

from jax.extend.core import Var

from autopar.devices import logical_mesh
from autopar.pipeline.layer_costs import LayerCost, LayerCosts, LayerFront, Shape, Way, phase_seconds, price_between
from autopar.pipeline.layer_ranges import LayerRanges, graph_key
from autopar.pipeline.stage_graph import StageGraph
from autopar.pipeline.stages import StageCost
from autopar.sharding.deferral import candidates
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.planner import MemoryBudgetError, Shardings, Start, plan_shardings
from autopar.sharding.problem import InfeasibleError
from autopar.sharding.spec import Spec
from simulator.costs import CostModel
from simulator.program import Phase

_WORTH = 2e-3
"""Share of a stage's time for which it is worth to look for another sharding of a layer."""


@dataclass(frozen=True, slots=True)
class SolvedStage:
    """A stage as it is sharded on a logical mesh, and what that costs.

    Attributes:
        phases: seconds of each phase of one microbatch; of the update, of a step.
        fixed_bytes: memory of one device without what microbatches in flight hold; micro_batch_bytes: what each of them holds.
    """

    shape: Shape
    shardings: Shardings
    phases: dict[Phase, float]

    @property
    def seconds(self) -> float:
        """One microbatch, forward and backward."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "U")

    @property
    def once_seconds(self) -> float:
        """What happens once per step."""
        return self.phases.get("U", 0.0)

    @property
    def fixed_bytes(self) -> float:
        return self.shardings.peak_bytes - self.shardings.held_bytes

    @property
    def micro_batch_bytes(self) -> float:
        return self.shardings.held_bytes

    def bytes(self, in_flight: int) -> float:
        return self.fixed_bytes + in_flight * self.micro_batch_bytes


@dataclass(frozen=True)
class ComposedStage:
    """Layers as a stage, each sharded in a way of its own.

    Attributes:
        start: number of the first layer.
        layers: their fronts and the points that were taken.
        price: of the memory, in seconds per byte and step; 0 where there is enough.
    """

    way: Way
    start: int
    layers: tuple[tuple[LayerFront, LayerCost], ...]
    price: float

    @cached_property
    def cost(self) -> StageCost:
        points = [point for _, point in self.layers]
        held = sum(point.priced.held_bytes for point in points)
        return StageCost(
            sum(point.seconds for point in points),
            sum(point.once_seconds for point in points),
            sum(point.priced.resident_bytes for point in points) - held + max(p.priced.extra_bytes for p in points),
            held,
            self.way.shape,
            self,
        )

    @property
    def step_seconds(self) -> float:
        """Of all microbatches, one after the other."""
        return sum(point.priced.seconds for _, point in self.layers)

    def bound(self, in_flight: int, budget: float) -> float:
        """Seconds of a step that no sharding of the stage is below which fits."""
        if not self.price:
            return sum(front.cheapest.priced.bound for front, _ in self.layers)
        counts = Counter(front for front, _ in self.layers)
        least = sum(n * front.at(self.price, in_flight).priced.bound for front, n in counts.items())
        return least - self.price * budget


class StageCosts:
    """The costs of runs of layers, within the memory of a device.

    Attributes:
        num_solves: how many solves of layers, and of whole stages, that took.
    """

    def __init__(self, ranges: LayerRanges, model: CostModel, options: ShardingOptions, budget: float) -> None:
        self.ranges, self.model, self.options, self.budget = ranges, model, options, budget
        self.layers = LayerCosts(model, options)
        self._composed: dict[Hashable, ComposedStage | None] = {}
        self._solved: dict[Hashable, SolvedStage] = {}
        self._ways: dict[Shape, tuple[Way, ...]] = {}

    @property
    def num_solves(self) -> int:
        return self.layers.num_solves + len(self._solved)

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """The ways to share the work on a mesh; pure data parallelism defers if it can, and is not compared with what doesn't."""
        if shape not in self._ways:
            step, mesh = self.ranges.cut.step, logical_mesh(shape)
            deferred = candidates(step, mesh, self.options.data_parallel) if self.options.mode == "solve" else ()
            found = [Way(shape, axes) for axes in deferred]
            if not self.options.data_parallel or not all(
                self._front(layer, way) for way in found for layer in self._all
            ):
                found.append(Way(shape, ()))
            self._ways[shape] = tuple(found)
        return self._ways[shape]

    @property
    def _all(self) -> range:
        return range(self.ranges.num_layers)

    def _front(self, layer: int, way: Way) -> LayerFront | None:
        return self.layers.front(self.ranges.layers[layer], way)

    def least(self, start: int, stop: int, shapes: Sequence[Shape]) -> tuple[float, float]:
        """Seconds of a microbatch, and of a step, that layers on any of the shapes take at least.

        The first is the work of one device, evenly shared. For the second, the layers that there are most of are solved roughly.
        """
        num_devices = prod(shapes[0])
        work = {layer: self._single(layer) for layer in range(start, stop)}
        common = [layer for layer in work if graph_key(self.ranges.layers[layer]) == self._most_common]
        rest = sum(each.cheapest.priced.bound for layer, each in work.items() if layer not in common) / num_devices
        seconds = sum(each.cheapest.seconds for each in work.values()) / num_devices
        if not common:
            return seconds, rest
        fronts = (self._front(common[0], way) for shape in shapes for way in self.ways(shape))
        return seconds, rest + len(common) * min((front.bound for front in fronts if front), default=inf)

    @cached_property
    def _most_common(self) -> Hashable:
        return Counter(map(graph_key, self.ranges.layers)).most_common(1)[0][0]

    def _single(self, layer: int) -> LayerFront:
        """A layer on one device, which every layer can run on."""
        front = self._front(layer, Way((1,), ()))
        assert front is not None
        return front

    def composed(self, start: int, stop: int, shapes: Sequence[Shape], in_flight: int) -> ComposedStage | None:
        """The cheapest composition that fits with so many microbatches in flight; None if there is none."""
        best: ComposedStage | None = None
        ways = [way for shape in shapes for way in self.ways(shape)]
        work = sum(self._single(layer).bound for layer in range(start, stop))
        heap = [(work / prod(way.shape), False, n, way) for n, way in enumerate(ways)]
        heapify(heap)
        while heap:
            bound, seen, n, way = heappop(heap)
            if best is not None and best.step_seconds <= bound:
                break
            if not seen:
                fronts = [self._front(layer, way) for layer in range(start, stop)]
                if all(fronts):
                    heappush(heap, (sum(front.bound for front in fronts if front), True, n, way))
                continue
            found = self._compose(start, stop, way, in_flight)
            if found is not None and (best is None or found.step_seconds < best.step_seconds):
                best = found
        return best

    def _compose(self, start: int, stop: int, way: Way, in_flight: int) -> ComposedStage | None:
        fronts = [self._front(layer, way) for layer in range(start, stop)]
        key = tuple(map(id, fronts)), in_flight
        if key not in self._composed:
            found = [front for front in fronts if front is not None]
            shared = self._shared(found, in_flight) if len(found) == len(fronts) else None
            self._composed[key] = shared and ComposedStage(way, start, *shared)
        known = self._composed[key]
        return known and (known if known.start == start else replace(known, start=start))

    def _shared(
        self, fronts: Sequence[LayerFront], in_flight: int
    ) -> tuple[tuple[tuple[LayerFront, LayerCost], ...], float] | None:
        """The points that layers take to fit together, and the price at which they do."""
        if _bytes((front.cheapest for front in fronts), in_flight) <= self.budget:
            return tuple((front, front.cheapest) for front in fronts), 0.0
        counts, hull = Counter(fronts), 1 << (in_flight - 1).bit_length()  # hulls serve several numbers in flight
        while True:
            points = {front: front.hull(hull) for front in counts}
            taken, price = self._moved(counts, points, hull, in_flight)
            if taken is None:
                return None
            total = sum(point.priced.seconds for each in taken.values() for point in each)
            gains = []
            for front, hull_points in points.items():
                for i, (a, b) in enumerate(pairwise(hull_points)):
                    beyond = sum(point in hull_points[i + 1 :] for point in taken[front])
                    gains.append((beyond * (b.priced.seconds - a.priced.seconds), len(gains), front, a, b))
            worth = sorted((gain for gain in gains if gain[0] > _WORTH * total), key=lambda gain: -gain[0])
            if not any(front.refine(hull, a, b) for _, _, front, a, b in worth):
                break
        self._relax(taken, in_flight)
        return tuple((front, taken[front].pop(0)) for front in fronts), price

    def _moved(
        self, counts: Counter[LayerFront], points: dict[LayerFront, list[LayerCost]], hull: int, in_flight: int
    ) -> tuple[dict[LayerFront, list[LayerCost]] | None, float]:
        """A point for every copy of each layer, the smallest first, once all fit together, and the price of the last move."""
        taken = {front: [points[front][0]] * n for front, n in counts.items()}
        moves = [
            (price_between(a, b, hull), order, i, front, b)
            for order, front in enumerate(counts)
            for i, (a, b) in enumerate(pairwise(points[front]))
        ]
        for price, _, _, front, smaller in sorted(moves, key=lambda move: move[:3]):
            for copy in range(counts[front]):
                taken[front][copy] = smaller
                if self._fit(taken, in_flight):
                    return taken, price
        return None, 0.0

    def _relax(self, taken: dict[LayerFront, list[LayerCost]], in_flight: int) -> None:
        """Let one copy of each layer take the cheapest point that still fits: what is left of the memory is less than a move."""
        for front, points in taken.items():
            last = max(range(len(points)), key=lambda i: points[i].priced.seconds - (points[i] is front.cheapest))
            for other in sorted(front.known, key=lambda point: point.priced.seconds):
                kept, points[last] = points[last], other
                if other is kept or self._fit(taken, in_flight):
                    break
                points[last] = kept

    def _fit(self, taken: dict[LayerFront, list[LayerCost]], in_flight: int) -> bool:
        return _bytes((point for points in taken.values() for point in points), in_flight) <= self.budget

    def cheapest(
        self, graph: StageGraph, layers: Sequence[int], shapes: Sequence[Shape], in_flight: int
    ) -> SolvedStage:
        """The cheapest stage of these layers, on one of the shapes, that fits with so many microbatches in flight.

        Raises:
            MemoryBudgetError: it does not fit.
            ShardingError, InfeasibleError: the options leave nothing.
        """
        composed = self.composed(layers[0], layers[-1] + 1, shapes, in_flight)
        if composed is not None:
            return self.solve(graph, composed, in_flight)
        found: list[SolvedStage] = []
        errors: list[ValueError] = []
        for shape in shapes:  # what layers keep together is an estimate
            try:
                found.append(self._whole(graph, shape, in_flight, None, True))
            except (ShardingError, InfeasibleError) as error:
                errors.append(error)
        if not found:
            raise min(errors, key=lambda error: error.least if isinstance(error, MemoryBudgetError) else inf)
        return min(found, key=lambda each: (each.shardings.seconds, each.shape))

    def solve(self, graph: StageGraph, composed: ComposedStage, in_flight: int, check: bool = True) -> SolvedStage:
        """A stage solved whole, starting from its composition.

        Args:
            check: make sure that it runs with what is deferred; that takes a trace, and fails seldom.

        Raises:
            MemoryBudgetError: it does not fit after all.
        """
        names = (graph.step.in_paths, graph.step.out_paths) if self.options.pins else ()
        key = graph_key(graph), names, composed.way, in_flight, check
        if key not in self._solved:
            start = Start(composed.way.deferred, self._specs(composed), composed.bound(in_flight, self.budget))
            self._solved[key] = self._whole(graph, composed.way.shape, in_flight, start, check)
        return self._solved[key]

    def _whole(self, graph: StageGraph, shape: Shape, in_flight: int, start: Start | None, check: bool) -> SolvedStage:
        step, costs = replace(graph.step, in_flight=in_flight), self.layers.mesh_costs(shape)
        found = plan_shardings(step, costs.mesh, self.model, self.options, self.budget, costs, check, start)
        return SolvedStage(
            shape,
            replace(found, peak_bytes=found.peak_bytes - (in_flight - 1) * found.held_bytes),
            phase_seconds(graph, found.eqn_seconds),
        )

    def _specs(self, composed: ComposedStage) -> dict[Var, Spec]:
        """Where each layer has the values that it makes."""
        specs: dict[Var, Spec] = {}
        for layer, (front, point) in enumerate(composed.layers, composed.start):
            step = self.ranges.layers[layer].step
            values = [*step.jaxpr.invars, *(var for eqn in step.jaxpr.eqns for var in eqn.outvars)]
            received = {step.jaxpr.invars[i] for i in step.received}
            for var, spec in zip(values, front.problem.specs(point.priced), strict=True):
                if spec is not None and var not in received:
                    specs[var] = spec
        return specs


def _bytes(points: Iterable[LayerCost], in_flight: int) -> float:
    """Memory of layers together: what all of them keep, and the most that one needs beside."""
    kept = extra = 0.0
    for point in points:
        kept += point.priced.bytes(in_flight)
        extra = max(extra, point.priced.extra_bytes)
    return kept + extra
