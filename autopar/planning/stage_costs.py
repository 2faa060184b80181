"""What stages cost: composed of what their layers cost, and solved whole for those that are taken."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf, prod

from jax.extend.core import Var

from autopar.devices import logical_mesh
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec
from autopar.ir.step_graph import MicrobatchError
from autopar.pipeline.stage_graph import StageGraph
from autopar.planning.composition import ComposedStage, compose
from autopar.planning.layer_costs import LayerCosts, LayerFront, MeshChoice, Shape, phase_seconds
from autopar.planning.layer_ranges import LayerRanges
from autopar.sharding.deferred_sync import candidates, check_parts
from autopar.sharding.lagrangian import values_of
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.planner import MemoryBudgetError, Shardings, Start, plan_shardings
from autopar.sharding.selection_problem import InfeasibleError
from simulator.costs.cost_model import CostModel
from simulator.program import Phase

_LEAST_ROOM = 0.8
"""Share of the budget that compositions may fill at least."""


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


class StageCosts:
    """The costs of runs of layers, within the memory of a device.

    Attributes:
        num_solves: how many solves of layers, and of whole stages, that took.
        room: memory that compositions may fill, which are estimates.
        revisions: how often a composition turned out not to run, or not to fit, so that others have to be looked for.
    """

    def __init__(
        self, ranges: LayerRanges, layers: LayerCosts, options: ShardingOptions, budget: float
    ) -> None:
        self.ranges, self.layers, self.options, self.budget = ranges, layers, options, budget
        self.model = layers.model
        self.room, self.revisions = budget, 0
        self._refused: set[MeshChoice] = set()
        self._composed: dict[Hashable, ComposedStage | None] = {}
        self._solved: dict[Hashable, SolvedStage] = {}
        self._mesh_choices: dict[Shape, tuple[MeshChoice, ...]] = {}

    @property
    def num_solves(self) -> int:
        return self.layers.num_solves + len(self._solved)

    def mesh_choices(self, shape: Shape) -> tuple[MeshChoice, ...]:
        """The ways to share the work on a mesh; pure data parallelism defers if it can, and is not compared with what doesn't."""
        if shape not in self._mesh_choices:
            step, mesh = self.ranges.partition.step, logical_mesh(shape)
            deferred = (
                candidates(step, mesh, self.options.data_parallel)
                if self.options.mode == "solve"
                else ()
            )
            # Along all of several axes it is what one axis gives.
            found = [
                MeshChoice(shape, a)
                for a in deferred
                if self._has_rows(mesh.ways(a)) and len(a) < max(len(shape), 2)
            ]
            if not self.options.data_parallel or not all(
                self._front(layer, choice)
                for choice in found
                for layer in range(self.ranges.num_layers)
            ):
                found.append(MeshChoice(shape, ()))
            self._mesh_choices[shape] = tuple(found)
        return self._mesh_choices[shape]

    def _has_rows(self, parts: int) -> bool:
        """Whether devices that see parts of a microbatch see several examples: a single one is traced in another way."""
        step = self.ranges.partition.step
        return all(aval_of(step.jaxpr.invars[i]).shape[0] > parts for i in step.batch)

    def _front(self, layer: int, choice: MeshChoice) -> LayerFront | None:
        return self.layers.front(self.ranges.layers[layer], choice)

    def least(self, start: int, stop: int, shapes: Sequence[Shape]) -> tuple[float, float]:
        """Seconds of a microbatch, and of a step, that layers on any of the shapes take at least.

        The first is the work of one device, evenly shared. For the second, the layers that there are most of are solved roughly.
        """
        num_devices = prod(shapes[0])
        work = {layer: self._single(layer) for layer in range(start, stop)}
        common = [layer for layer in work if self._kinds[layer] == self._most_common]
        rest = (
            sum(each.cheapest.priced.bound for layer, each in work.items() if layer not in common)
            / num_devices
        )
        seconds = sum(each.cheapest.seconds for each in work.values()) / num_devices
        if not common:
            return seconds, rest
        fronts = (
            self._front(common[0], choice)
            for shape in shapes
            for choice in self.mesh_choices(shape)
        )
        return seconds, rest + len(common) * min(
            (front.bound for front in fronts if front), default=inf
        )

    @cached_property
    def _most_common(self) -> int:
        return Counter(self._kinds).most_common(1)[0][0]

    def _single(self, layer: int) -> LayerFront:
        """A layer on one device, which every layer can run on."""
        front = self._front(layer, MeshChoice((1,), ()))
        assert front is not None
        return front

    def composed(
        self, start: int, stop: int, shapes: Sequence[Shape], in_flight: int
    ) -> ComposedStage | None:
        """The cheapest composition that fits with so many microbatches in flight; None if there is none."""
        best: ComposedStage | None = None
        choices = [
            choice
            for shape in shapes
            for choice in self.mesh_choices(shape)
            if choice not in self._refused
        ]
        kinds = Counter(self._kinds[layer] for layer in range(start, stop)).most_common()
        work = [count * self._single(kind).bound for kind, count in kinds]
        heap = [(sum(work) / prod(choice.shape), 0, n, choice) for n, choice in enumerate(choices)]
        heapify(heap)
        while heap:
            bound, solved, n, choice = heappop(heap)
            if best is not None and best.step_seconds <= bound:
                break
            if solved < len(kinds):  # one kind of layer more, those that there are most of first
                kind, count = kinds[solved]
                if front := self._front(kind, choice):
                    bound += count * front.bound - work[solved] / prod(choice.shape)
                    heappush(heap, (bound, solved + 1, n, choice))
                continue
            found = self._compose(start, stop, choice, in_flight)
            if found is not None and (best is None or found.step_seconds < best.step_seconds):
                best = found
        return best

    @cached_property
    def _kinds(self) -> list[int]:
        """For each layer the first one that is planned as it is."""
        keys = [self.layers.kind(graph) for graph in self.ranges.layers]
        return [keys.index(key) for key in keys]

    def _compose(
        self, start: int, stop: int, choice: MeshChoice, in_flight: int
    ) -> ComposedStage | None:
        fronts = [self._front(layer, choice) for layer in range(start, stop)]
        key = tuple(map(id, fronts)), in_flight
        if key not in self._composed:
            found = [front for front in fronts if front is not None]
            complete = len(found) == len(fronts)
            self._composed[key] = (
                compose(choice, start, found, in_flight, self.room) if complete else None
            )
        known = self._composed[key]
        return known and (known if known.start == start else replace(known, start=start))

    def cheapest(
        self, graph: StageGraph, layers: Sequence[int], shapes: Sequence[Shape], in_flight: int
    ) -> SolvedStage:
        """The cheapest stage of these layers, on one of the shapes, that fits with so many microbatches in flight.

        Raises:
            MemoryBudgetError: it does not fit.
            ShardingError, InfeasibleError: the options leave nothing.
        """
        while composed := self.composed(layers[0], layers[-1] + 1, shapes, in_flight):
            if not self._runs(graph, composed.mesh_choice):
                self.revisions += 1
                self._refused.add(composed.mesh_choice)
                continue
            try:
                return self.solve(graph, composed, in_flight)
            except MemoryBudgetError:
                self.revisions += 1
                self.room -= 0.05 * self.budget
                self._composed.clear()
                if self.room < _LEAST_ROOM * self.budget:
                    raise
        found: list[SolvedStage] = []
        errors: list[ValueError] = []
        for shape in shapes:  # what layers keep together is an estimate
            try:
                found.append(self._whole(graph, shape, in_flight, None))
            except (ShardingError, InfeasibleError) as error:
                errors.append(error)
        if not found:
            raise min(
                errors,
                key=lambda error: error.least if isinstance(error, MemoryBudgetError) else inf,
            )
        return min(found, key=lambda each: (each.shardings.seconds, each.shape))

    def _runs(self, graph: StageGraph, choice: MeshChoice) -> bool:
        """Whether a stage runs with what the way defers; it takes a trace to see that, and it fails seldom."""
        try:
            check_parts(graph.step, logical_mesh(choice.shape), choice.deferred)
        except MicrobatchError:
            return False
        return True

    def solve(self, graph: StageGraph, composed: ComposedStage, in_flight: int) -> SolvedStage:
        """A stage solved whole, starting from its composition.

        Raises:
            MemoryBudgetError: it does not fit after all.
        """
        key = self.layers.kind(graph), composed.mesh_choice, in_flight
        if key not in self._solved:
            start = Start(
                composed.mesh_choice.deferred,
                self._specs(composed),
                composed.bound(in_flight, self.budget),
            )
            self._solved[key] = self._whole(graph, composed.mesh_choice.shape, in_flight, start)
        return self._solved[key]

    def _whole(
        self, graph: StageGraph, shape: Shape, in_flight: int, start: Start | None
    ) -> SolvedStage:
        step, costs = replace(graph.step, in_flight=in_flight), self.layers.mesh_costs(shape)
        found = plan_shardings(
            step, costs.mesh, self.model, self.options, self.budget, costs, start
        )
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
            received = {step.jaxpr.invars[i] for i in step.received}
            for var, spec in zip(values_of(step), front.problem.specs(point.priced), strict=True):
                if spec is not None and var not in received:
                    specs[var] = spec
        return specs


@dataclass(frozen=True, slots=True)
class ClusterStageCosts:
    """The costs of runs of layers wherever in a cluster they are.

    Attributes:
        pools: in each of its pools, with that pool's devices and memory.
        links: the costs of transfers between stages, by numbers of devices in the cluster.
    """

    pools: tuple[StageCosts, ...]
    links: CostModel

    @property
    def ranges(self) -> LayerRanges:
        return self.pools[0].ranges

    @property
    def options(self) -> ShardingOptions:
        return self.pools[0].options

    @property
    def num_solves(self) -> int:
        return sum(pool.num_solves for pool in self.pools)

    @property
    def revisions(self) -> int:
        return sum(pool.revisions for pool in self.pools)
