"""What layers cost: for each kind of layer, seen as each mesh, the shardings that are cheapest at some price of memory."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from autopar.devices import logical_mesh
from autopar.pipeline.layer_ranges import graph_key
from autopar.pipeline.stage_graph import StageGraph
from autopar.sharding.costs import MeshCosts
from autopar.sharding.deferral import Axes
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.priced import Priced, PricedProblem
from autopar.sharding.problem import InfeasibleError
from simulator.costs import CostModel
from simulator.program import Phase

type Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Way:
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

    It is found as it is asked for, point by point.

    Raises:
        MissingRuleError, ShardingError: the layer can't be sharded in this way.
    """

    def __init__(self, graph: StageGraph, way: Way, costs: MeshCosts, options: ShardingOptions) -> None:
        self.graph = graph
        backward = [eqns[0][0] for task, eqns in graph.tasks.items() if task.phase in ("B", "I") and eqns]
        last = len(graph.step.microbatching.body) if graph.step.microbatching else 0
        self.problem = PricedProblem(graph.step, costs, options, way.deferred, min(backward, default=last))
        self.num_solves = 0
        self._points: dict[int, list[LayerCost]] = {}
        self._settled: set[tuple[int, int, int]] = set()

    @cached_property
    def cheapest(self) -> LayerCost:
        """Where memory costs nothing. Raises InfeasibleError if the options leave nothing."""
        return self.at(0.0, 1)

    def at(self, price: float, in_flight: int) -> LayerCost:
        """The cheapest at a price, in seconds per byte and step."""
        self.num_solves += 1
        found = self.problem.solve(price, in_flight)
        phases = phase_seconds(self.graph, self.problem.eqn_seconds(found))
        once = phases.pop("U", 0.0)
        return LayerCost(found, sum(phases.values()), once)

    def points(self, in_flight: int) -> list[LayerCost]:
        """The hull as far as it is known, from the cheapest to the smallest, with so many microbatches in flight."""
        if in_flight not in self._points:
            first = self.cheapest
            price = _DEAR * first.priced.seconds / first.priced.bytes(in_flight)
            least = self.at(price, in_flight)
            smaller = least.priced.bytes(in_flight) < first.priced.bytes(in_flight)
            self._points[in_flight] = [first, least] if smaller else [first]
        return self._points[in_flight]

    def refine(self, in_flight: int, position: int) -> bool:
        """Look for a point of the hull between two that are known; whether there is one."""
        points = self._points[in_flight]
        a, b = points[position].priced, points[position + 1].priced
        key = in_flight, id(points[position]), id(points[position + 1])
        if key in self._settled:
            return False
        price = (b.seconds - a.seconds) / (a.bytes(in_flight) - b.bytes(in_flight))
        found = self.at(price, in_flight)
        between = b.bytes(in_flight) < found.priced.bytes(in_flight) < a.bytes(in_flight)
        line = a.seconds + price * a.bytes(in_flight)
        if between and found.priced.seconds + price * found.priced.bytes(in_flight) < line * (1 - _SAME):
            points.insert(position + 1, found)
            return True
        self._settled.add(key)
        return False


_DEAR = 100.0
"""The price of all that a layer keeps, in times that it takes, at which memory is all that counts."""

_SAME = 1e-4
"""Relative difference of costs that is not worth a point."""


class LayerCosts:
    """The fronts of layers, made once for all layers that are alike.

    Attributes:
        num_solves: how many solves that took.
    """

    def __init__(self, model: CostModel, options: ShardingOptions) -> None:
        self.model, self.options = model, options
        self._costs: dict[Shape, MeshCosts] = {}
        self._fronts: dict[Hashable, LayerFront | None] = {}

    @property
    def num_solves(self) -> int:
        return sum(front.num_solves for front in self._fronts.values() if front)

    def mesh_costs(self, shape: Shape) -> MeshCosts:
        if shape not in self._costs:
            self._costs[shape] = MeshCosts(logical_mesh(shape), self.model, self.options.forbidden)
        return self._costs[shape]

    def known(self, graph: StageGraph, way: Way) -> LayerFront | None:
        """The front of a layer if it was asked for before."""
        return self._fronts.get(self._key(graph, way))

    def front(self, graph: StageGraph, way: Way) -> LayerFront | None:
        """The front of a layer; None if it can't be sharded in this way."""
        key = self._key(graph, way)
        if key not in self._fronts:
            self._fronts[key] = None
            try:
                front = LayerFront(graph, way, self.mesh_costs(way.shape), self.options)
                _ = front.cheapest
            except (ShardingError, InfeasibleError):
                return None
            self._fronts[key] = front
        return self._fronts[key]

    def _key(self, graph: StageGraph, way: Way) -> Hashable:
        names = (graph.step.in_paths, graph.step.out_paths) if self.options.pins else ()
        return graph_key(graph), names, way


def phase_seconds(graph: StageGraph, eqn_seconds: tuple[float, ...]) -> dict[Phase, float]:
    """Seconds of each phase: of one microbatch; of the update, of a step.

    Equations that several phases compute count in the first; those of no task bring results where the next step wants them.
    """
    phase_of: dict[int, Phase] = {}
    for task, eqns in graph.tasks.items():
        for number, _ in eqns:
            phase_of.setdefault(number, task.phase)
    body = {number for number, _ in graph.step.microbatching.body} if graph.step.microbatching else set()
    seconds: dict[Phase, float] = {task.phase: 0.0 for task in graph.tasks}
    for number, cost in enumerate(eqn_seconds):
        phase = phase_of.get(number, "U")
        count = graph.step.num_micro_batches if number in body else 1
        seconds[phase] = seconds.get(phase, 0.0) + cost / count
    return seconds
