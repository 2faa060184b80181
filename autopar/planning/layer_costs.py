"""Costs of layers: the shardings of each kind of layer that are optimal at some price of memory."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

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
    """The logical mesh of a stage, and how gradients are accumulated on it.

    Attributes:
        shape: shape of the logical mesh.
        deferred: axes along which each device accumulates gradients of its own examples, to be
            synchronized once per step.
    """

    shape: Shape
    deferred: Axes


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A sharding of a layer with its time.

    Attributes:
        priced: the sharding, with the time of a step and its memory.
        seconds: seconds of one microbatch.
        once_seconds: seconds of the work that happens once per step.
    """

    priced: Priced
    seconds: float
    once_seconds: float


class LayerFront:
    """The shardings of a layer that are optimal at some price of memory, for one `MeshChoice`.

    They are the vertices of the convex hull of seconds against bytes. Points are computed one by
    one as they are needed.

    Attributes:
        graph: the layer as a stage.
        problem: the layer's Lagrangian problem: the selection problem with a price of memory.
        points: the points computed so far.
        num_solves: number of solves that they took.

    Raises:
        MissingRuleError, ShardingError: the layer cannot be sharded on this mesh.
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
        self.points: list[LayerCost] = []
        self._least_seconds: dict[int, float] = {}
        self._least_peak: dict[int, float] = {}
        self._least_bytes: dict[int, tuple[float, float]] = {}
        self._least_as_program: dict[tuple[int, float], tuple[float, float]] = {}
        self._with_smallest: set[int] = set()
        self._refined: set[tuple[int, int, int]] = set()

    @cached_property
    def bound(self) -> float:
        """Rough lower bound of the seconds of a step.

        Raises:
            InfeasibleError: the options leave no sharding.
        """
        return self.problem.bound(1, _ROUGH_GAP)

    def least_seconds(self, parts: int) -> float:
        """Return a rough lower bound of the seconds of a step; `bound` if there is one part.

        It is infinite if the options leave no sharding.

        Args:
            parts: number of parts into which microbatches are divided further.
        """
        if parts not in self._least_seconds:
            try:
                bound = self.problem.bound(parts, _ROUGH_GAP) if parts > 1 else self.bound
            except InfeasibleError:
                bound = inf
            self._least_seconds[parts] = bound
        return self._least_seconds[parts]

    def least_peak(self, parts: int) -> float:
        """Return a lower bound of the bytes of one device while one of `parts` parts runs.

        It is infinite if the parts are too small.
        """
        if parts not in self._least_peak:
            try:
                self._least_peak[parts] = self.problem.least_bytes(parts)
            except InfeasibleError:
                self._least_peak[parts] = inf
        return self._least_peak[parts]

    def least_bytes(self, in_flight: int) -> tuple[float, float]:
        """Return lower bounds of the resident bytes, and of the bytes while the layer runs.

        Args:
            in_flight: number of microbatches in flight.
        """
        if in_flight not in self._least_bytes:
            problem = self.problem
            resident = problem.least_resident_bytes(in_flight)
            running = self.least_peak(1) + (in_flight - 1) * problem.least_saved_bytes
            self._least_bytes[in_flight] = resident, max(resident, running)
        return self._least_bytes[in_flight]

    def least_as_program(self, num_micro_batches: int, price: float) -> tuple[float, float]:
        """Return a lower bound of the seconds of a step and of priced memory, as one program.

        See `PricedProblem.bound_as_program`.

        Args:
            num_micro_batches: number of microbatches, at least as many as the step has.
            price: seconds per byte and step.

        Returns:
            The bound of both together, and the bytes of one device under a choice near it.

        Raises:
            InfeasibleError: the options leave no sharding.
        """
        key = num_micro_batches, price
        if key not in self._least_as_program:
            self._least_as_program[key] = self.problem.bound_as_program(*key, _PROGRAM_GAP)
        return self._least_as_program[key]

    @cached_property
    def cheapest(self) -> LayerCost:
        """The fastest sharding, where memory has no price."""
        return self.at(0.0, 1)

    def at(self, price: float, in_flight: int) -> LayerCost:
        """Return the cheapest sharding at a price of memory.

        Args:
            price: seconds per byte and step.
            in_flight: number of microbatches in flight.
        """
        self.num_solves += 1
        known = (point.priced for point in self.points)
        start = min(known, key=lambda p: p.seconds + price * p.bytes(in_flight), default=None)
        priced = self.problem.solve(price, in_flight, _HULL_GAP, start)
        phases = phase_seconds(self.graph, self.problem.eqn_seconds(priced))
        once_seconds = phases.pop("U", 0.0)
        self.points.append(LayerCost(priced, sum(phases.values()), once_seconds))
        return self.points[-1]

    def hull(self, in_flight: int) -> list[LayerCost]:
        """Return the hull of the points computed so far, from the fastest to the smallest.

        The smallest one may be that for another number of microbatches in flight.

        Args:
            in_flight: number of microbatches in flight.
        """
        if not self._with_smallest:
            self.add_smallest(in_flight)
        hull: list[LayerCost] = []
        for point in sorted(
            self.points, key=lambda point: (point.priced.seconds, point.priced.bytes(in_flight))
        ):
            if hull and point.priced.bytes(in_flight) >= hull[-1].priced.bytes(in_flight):
                continue
            while len(hull) > 1 and price_between(hull[-2], hull[-1], in_flight) >= price_between(
                hull[-1], point, in_flight
            ):
                hull.pop()
            hull.append(point)
        return hull

    def add_smallest(self, in_flight: int) -> bool:
        """Compute the smallest point, and return whether it was not computed before.

        Args:
            in_flight: number of microbatches in flight.
        """
        if in_flight in self._with_smallest:
            return False
        self._with_smallest.add(in_flight)
        fastest = self.cheapest.priced
        self.at(_HIGH_PRICE * fastest.seconds / fastest.bytes(in_flight), in_flight)
        return True

    def refine(self, in_flight: int, a: LayerCost, b: LayerCost) -> bool:
        """Look for a point between two neighbours on the hull, and return whether there is one.

        Args:
            in_flight: number of microbatches in flight.
            a: a point of the hull.
            b: the next smaller one.
        """
        key = in_flight, id(a), id(b)
        if key in self._refined:
            return False
        self._refined.add(key)
        price = price_between(a, b, in_flight)
        priced = self.at(price, in_flight).priced
        line = a.priced.seconds + price * a.priced.bytes(in_flight)
        cost = priced.seconds + price * priced.bytes(in_flight)
        return cost < line - _MIN_GAIN * a.priced.seconds


def price_between(a: LayerCost, b: LayerCost, in_flight: int) -> float:
    """Return the price in seconds per byte at which `a` and the smaller `b` cost the same."""
    seconds = b.priced.seconds - a.priced.seconds
    return seconds / (a.priced.bytes(in_flight) - b.priced.bytes(in_flight))


_HIGH_PRICE = 100.0
"""Price of all bytes of a layer, as a multiple of its time, at which only memory matters."""

_ROUGH_GAP = 0.5
"""Relative gap of the solve that decides whether a mesh choice can be of use."""

_PROGRAM_GAP = 0.02
"""Relative gap of the solves for bounds of the step as one program."""

_HULL_GAP = 1e-3
"""Relative gap of the solves for points of a hull."""

_MIN_GAIN = 1e-3
"""Smallest relative improvement that counts as a new point of a hull."""


class LayerCosts:
    """The fronts of layers, computed once for all layers of the same kind.

    Attributes:
        model: costs of work on any device.
        options: limits on shardings, without a tolerance: each solve has its own.
    """

    def __init__(self, model: CostModel, options: ShardingOptions) -> None:
        self.model = model
        self.options = replace(options, tolerance=0.0)
        self._mesh_costs: dict[Shape, MeshCosts] = {}
        self._fronts: dict[Hashable, LayerFront | None] = {}

    @property
    def num_solves(self) -> int:
        """Number of solves that all fronts took."""
        return sum(front.num_solves for front in self._fronts.values() if front)

    def mesh_costs(self, shape: Shape) -> MeshCosts:
        """Return the costs of collectives on a logical mesh."""
        if shape not in self._mesh_costs:
            mesh = logical_mesh(shape)
            self._mesh_costs[shape] = MeshCosts(mesh, self.model, self.options.forbidden)
        return self._mesh_costs[shape]

    def front(self, graph: StageGraph, choice: MeshChoice) -> LayerFront | None:
        """Return the front of a layer; None if it cannot be sharded on this mesh."""
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
        """Return a key that is equal for graphs that are planned alike.

        Pins match values by name, so with pins the names belong to the key.
        """
        names = (graph.step.in_paths, graph.step.out_paths) if self.options.pins else ()
        return graph_key(graph), names


def phase_seconds(graph: StageGraph, eqn_seconds: tuple[float, ...]) -> dict[Phase, float]:
    """Return the seconds of each phase: of one microbatch, or of a step for the update.

    Equations that belong to no task count as part of the update.

    Args:
        graph: a stage.
        eqn_seconds: seconds of each of its equations in one step.
    """
    micro = graph.step.microbatching
    body = {number for number, _ in micro.body} if micro else set()
    seconds: dict[Phase, float] = {task.phase: 0.0 for task in graph.tasks}
    for number, cost in enumerate(eqn_seconds):
        phase = graph.task_of[number].phase if number in graph.task_of else "U"
        count = graph.step.num_micro_batches if number in body else 1
        seconds[phase] = seconds.get(phase, 0.0) + cost / count
    return seconds
