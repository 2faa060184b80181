"""What stages cost: composed of what their layers cost, and solved whole for those that are taken.

The layers of a stage share its memory. Each gives the hull of its shardings (`layer_costs`); they move along their hulls, the one
that pays the least per byte first, until the stage fits. That is the Lagrangian relaxation of the stage's own problem, and its
bound proves how good the sharding is that is made of the layers' ones.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, prod

from jax.extend.core import Var

from autopar.devices import logical_mesh
from autopar.pipeline.layer_costs import LayerCost, LayerCosts, LayerFront, Shape, Way, phase_seconds
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

    def least(self, start: int, stop: int, num_devices: int) -> StageCost:
        """What layers cost at least: the work of one device, evenly shared, and nothing for communication."""
        single = [self._front(layer, Way((1,), ())) for layer in range(start, stop)]
        seconds = [front.cheapest for front in single if front is not None]
        return StageCost(
            sum(each.seconds for each in seconds) / num_devices,
            sum(each.once_seconds for each in seconds) / num_devices,
        )

    def composed(self, start: int, stop: int, shapes: Sequence[Shape], in_flight: int) -> ComposedStage | None:
        """The cheapest composition that fits with so many microbatches in flight; None if there is none."""
        best: ComposedStage | None = None
        ways = [way for shape in shapes for way in self.ways(shape)]
        for bound, _, way in sorted((self._bound(start, stop, way), n, way) for n, way in enumerate(ways)):
            if best is not None and best.step_seconds <= bound:
                break
            found = self._compose(start, stop, way, in_flight)
            if found is not None and (best is None or found.step_seconds < best.step_seconds):
                best = found
        return best

    def _bound(self, start: int, stop: int, way: Way) -> float:
        """Seconds of a step that no composition is below."""
        bound = 0.0
        for layer in range(start, stop):
            front = self.layers.known(self.ranges.layers[layer], way)
            single = self._front(layer, Way((1,), ()))
            if front is not None:
                bound += front.cheapest.priced.bound
            elif single is not None:
                bound += single.cheapest.priced.bound / prod(way.shape)
        return bound

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
            moved, price, fit = self._moved(counts, hull, in_flight)
            if not fit:
                return None
            total = sum(n * f.points(hull)[i].priced.seconds for (f, i), n in moved.items())
            gains = {
                (front, i): sum(n for (f, k), n in moved.items() if f is front and k > i) * dearer
                for front in counts
                for i, dearer in enumerate(_steps(front.points(hull)))
            }
            worth = [(gain, front, i) for (front, i), gain in gains.items() if gain > _WORTH * total]
            if not any(front.refine(hull, i) for _, front, i in sorted(worth, key=lambda each: (-each[0], each[2]))):
                break
        smallest_first = {
            f: [i for i in reversed(range(len(f.points(hull)))) for _ in range(moved[f, i])] for f in counts
        }
        return tuple((f, f.points(hull)[smallest_first[f].pop(0)]) for f in fronts), price

    def _moved(
        self, counts: Counter[LayerFront], hull: int, in_flight: int
    ) -> tuple[Counter[tuple[LayerFront, int]], float, bool]:
        """How many copies of each layer are at each point of its hull once all fit together; the price of the last move."""
        at = Counter({(front, 0): n for front, n in counts.items()})
        moves = [
            (_price(a, b, hull), order, i, front)
            for order, front in enumerate(counts)
            for i, (a, b) in enumerate(pairwise(front.points(hull)))
        ]
        price = 0.0
        for price, _, i, front in sorted(moves, key=lambda move: move[:3]):
            for _ in range(counts[front]):
                at[front, i] -= 1
                at[front, i + 1] += 1
                if self._fits(at, hull, in_flight):
                    return +at, price, True
        return +at, price, False

    def _fits(self, at: Counter[tuple[LayerFront, int]], hull: int, in_flight: int) -> bool:
        return _bytes((f.points(hull)[i] for (f, i), n in at.items() for _ in range(n)), in_flight) <= self.budget

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


def _price(a: LayerCost, b: LayerCost, in_flight: int) -> float:
    """What a byte costs when a layer goes from `a` to `b`, which is smaller."""
    return (b.priced.seconds - a.priced.seconds) / (a.priced.bytes(in_flight) - b.priced.bytes(in_flight))


def _steps(points: Sequence[LayerCost]) -> list[float]:
    """By how much each point of a hull is dearer than the one before."""
    return [b.priced.seconds - a.priced.seconds for a, b in pairwise(points)]
