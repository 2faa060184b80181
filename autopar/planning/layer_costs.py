"""What layers cost: for each kind of layer, seen as each mesh, the shardings that are cheapest at some price of memory."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.devices import logical_mesh
from autopar.pipeline.stage_graph import StageGraph
from autopar.planning.layer_ranges import graph_key
from autopar.sharding.deferred_sync import Axes
from autopar.sharding.lagrangian import Priced, PricedProblem
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from simulator.costs.cost_model import CostModel
from simulator.program import Phase

type Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """How devices share the work: as a logical mesh of that shape, accumulating apart along the deferred axes."""

    shape: Shape
    deferred: Axes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A sharding of a layer, and what a microbatch takes; `once_seconds` is what happens once per step."""

    priced: Priced
    seconds: float
    once_seconds: float


class LayerFront:
    """The shardings of a layer in one way that are cheapest at some price of memory: the convex hull of seconds against bytes.

    It is found as it is asked for, point by point; `known` are all that were found.

    Raises:
        MissingRuleError, ShardingError: the layer can't be sharded in this way.
    """

    def __init__(
        self, graph: StageGraph, choice: MeshChoice, costs: MeshCosts, options: ShardingOptions
    ) -> None:
        self.graph = graph
        forward = [eqns[-1][0] for task, eqns in graph.tasks.items() if task.phase == "F" and eqns]
        self.problem = PricedProblem(
            graph.step, costs, options, choice.deferred, max(forward, default=-1) + 1
        )
        self.num_solves = 0
        self.known: list[LayerCost] = []
        self._smallest: set[int] = set()
        self._settled: set[tuple[int, int, int]] = set()

    @cached_property
    def bound(self) -> float:
        """Seconds of a step that no sharding is below, roughly. Raises InfeasibleError if the options leave nothing."""
        return self.problem.solve(0.0, 1, _ROUGHLY).bound

    @cached_property
    def cheapest(self) -> LayerCost:
        """Where memory costs nothing."""
        return self.at(0.0, 1)

    def at(self, price: float, in_flight: int) -> LayerCost:
        """The cheapest at a price, in seconds per byte and step."""
        self.num_solves += 1
        found = self.problem.solve(price, in_flight, _NEARLY)
        phases = phase_seconds(self.graph, self.problem.eqn_seconds(found))
        once = phases.pop("U", 0.0)
        self.known.append(LayerCost(found, sum(phases.values()), once))
        return self.known[-1]

    def hull(self, in_flight: int) -> list[LayerCost]:
        """The hull as far as it is known, from the cheapest to the smallest, with so many microbatches in flight."""
        first = self.cheapest
        if in_flight not in self._smallest:
            self._smallest.add(in_flight)
            self.at(_DEAR * first.priced.seconds / first.priced.bytes(in_flight), in_flight)
        hull: list[LayerCost] = []
        for point in sorted(
            self.known, key=lambda point: (point.priced.seconds, point.priced.bytes(in_flight))
        ):
            if hull and point.priced.bytes(in_flight) >= hull[-1].priced.bytes(in_flight):
                continue
            while len(hull) > 1 and price_between(hull[-2], hull[-1], in_flight) >= price_between(
                hull[-1], point, in_flight
            ):
                hull.pop()
            hull.append(point)
        return hull

    def refine(self, in_flight: int, a: LayerCost, b: LayerCost) -> bool:
        """Look for a point between two neighbours on the hull; whether there is one."""
        key = in_flight, id(a), id(b)
        if key in self._settled:
            return False
        self._settled.add(key)
        price = price_between(a, b, in_flight)
        found = self.at(price, in_flight).priced
        line = a.priced.seconds + price * a.priced.bytes(in_flight)
        return found.seconds + price * found.bytes(in_flight) < line - _SAME * a.priced.seconds


def price_between(a: LayerCost, b: LayerCost, in_flight: int) -> float:
    """What a byte costs when a layer goes from `a` to `b`, which is smaller."""
    return (b.priced.seconds - a.priced.seconds) / (
        a.priced.bytes(in_flight) - b.priced.bytes(in_flight)
    )


_DEAR = 100.0
"""The price of all that a layer keeps, in times that it takes, at which memory is all that counts."""

_ROUGHLY = 0.5
"""Gap with which a layer is solved to see whether the way can be of use."""

_NEARLY = 1e-3
"""Gap with which the points of a hull are found."""

_SAME = 1e-3
"""Relative difference of costs that is not worth a point."""


class LayerCosts:
    """The fronts of layers, made once for all layers that are alike.

    Attributes:
        num_solves: how many solves that took.
    """

    def __init__(self, model: CostModel, options: ShardingOptions) -> None:
        self.model, self.options = model, replace(options, tolerance=0.0)  # each solve has its own
        self._costs: dict[Shape, MeshCosts] = {}
        self._fronts: dict[Hashable, LayerFront | None] = {}

    @property
    def num_solves(self) -> int:
        return sum(front.num_solves for front in self._fronts.values() if front)

    def mesh_costs(self, shape: Shape) -> MeshCosts:
        if shape not in self._costs:
            self._costs[shape] = MeshCosts(logical_mesh(shape), self.model, self.options.forbidden)
        return self._costs[shape]

    def front(self, graph: StageGraph, choice: MeshChoice) -> LayerFront | None:
        """The front of a layer; None if it can't be sharded in this way."""
        key = self.kind(graph), choice
        if key not in self._fronts:
            self._fronts[key] = None
            try:
                front = LayerFront(graph, choice, self.mesh_costs(choice.shape), self.options)
                _ = front.bound
            except (ShardingError, InfeasibleError):
                return None
            self._fronts[key] = front
        return self._fronts[key]

    def kind(self, graph: StageGraph) -> Hashable:
        """Equal for graphs that are planned alike; pins tell them apart by the names of their values, too."""
        names = (graph.step.in_paths, graph.step.out_paths) if self.options.pins else ()
        return graph_key(graph), names


def phase_seconds(graph: StageGraph, eqn_seconds: tuple[float, ...]) -> dict[Phase, float]:
    """Seconds of each phase: of one microbatch; of the update, with what is of no task, of a step."""
    body = (
        {number for number, _ in graph.step.microbatching.body}
        if graph.step.microbatching
        else set()
    )
    seconds: dict[Phase, float] = {task.phase: 0.0 for task in graph.tasks}
    for number, cost in enumerate(eqn_seconds):
        phase = graph.task_of[number].phase if number in graph.task_of else "U"
        count = graph.step.num_micro_batches if number in body else 1
        seconds[phase] = seconds.get(phase, 0.0) + cost / count
    return seconds
