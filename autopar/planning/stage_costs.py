"""Costs of stages: estimates composed of the costs of layers, and solves of whole stages."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
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
from autopar.planning.composition import (
    ComposedStage,
    compose,
    least_within_memory,
    may_be_faster,
)
from autopar.planning.layer_costs import LayerCosts, LayerFront, MeshChoice, Shape, phase_seconds
from autopar.planning.layer_ranges import LayerRanges
from autopar.sharding.deferred_sync import candidates, check_parts
from autopar.sharding.lagrangian import values_of
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.plan_shardings import Shardings, plan_shardings
from autopar.sharding.selection_problem import InfeasibleError
from autopar.sharding.solve_within_memory import MemoryBudgetError, Start
from simulator.costs.cost_model import CostModel
from simulator.program import Phase

_LEAST_ROOM = 0.8
"""Smallest share of the budget that compositions may be limited to."""

_LESS_ROOM = 0.05
"""Share of the budget by which compositions are limited further where they do not fit."""


@dataclass(frozen=True, slots=True)
class SolvedStage:
    """A stage with its sharding on a logical mesh.

    Attributes:
        shape: shape of the logical mesh.
        shardings: the sharding, with its time and its memory for one microbatch.
        phases: seconds of each phase of one microbatch; of a step for the update.
    """

    shape: Shape
    shardings: Shardings
    phases: dict[Phase, float]

    @property
    def seconds(self) -> float:
        """Seconds of one microbatch, forward and backward."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != "U")

    @property
    def once_seconds(self) -> float:
        """Seconds of the work that happens once per step."""
        return self.phases.get("U", 0.0)

    @property
    def fixed_bytes(self) -> float:
        """Memory of one device without the activations of microbatches in flight."""
        return self.shardings.peak_bytes - self.shardings.saved_bytes

    @property
    def micro_batch_bytes(self) -> float:
        """Memory of one device for the activations of each microbatch in flight."""
        return self.shardings.saved_bytes

    def bytes(self, in_flight: int) -> float:
        """Return the memory of one device with `in_flight` microbatches in flight."""
        return self.fixed_bytes + in_flight * self.micro_batch_bytes

    def scheduled_bytes(self, waiting: Iterable[tuple[int, int]]) -> float:
        """Return the memory of one device, with the microbatches that wait in a schedule.

        Args:
            waiting: how many wait for their backward pass, and how many for their weight gradients
                alone (`Schedule.waiting`).
        """
        all_saved, for_weights = self.shardings.waiting_bytes
        held = max(backward * all_saved + last * for_weights for backward, last in waiting)
        return self.shardings.peak_bytes + held


@dataclass(frozen=True, slots=True)
class LeastCost:
    """Lower bounds of the cost of a stage.

    Attributes:
        seconds: seconds of a microbatch, the work on one device divided by the number of devices.
        step_seconds: seconds of a step. Layers of the most common kind are solved roughly.
        layer: a layer of the most common kind; None if the stage has none.
        layer_bytes: bytes of one device while this layer runs, without those of other layers.
    """

    seconds: float
    step_seconds: float
    layer: int | None = None
    layer_bytes: float = 0.0


class StageCosts:
    """Costs of the stages that consecutive layers can form, in the memory of one kind of device.

    Attributes:
        ranges: the layers and the stages that they can form.
        layers: costs of the layers.
        options: limits on shardings.
        budget: bytes of one device that a stage may use.
        model: costs of work on any device.
        room: bytes that compositions may use, by default the budget. They are estimates, so this is
            lowered when a stage does not fit after all.
        revisions: number of compositions that did not run, or did not fit, when they were solved
            whole. Costs differ after each.
    """

    def __init__(
        self,
        ranges: LayerRanges,
        layers: LayerCosts,
        options: ShardingOptions,
        budget: float,
        room: float | None = None,
    ) -> None:
        self.ranges = ranges
        self.layers = layers
        self.options = options
        self.budget = budget
        self.model = layers.model
        self.room = budget if room is None else room
        self.revisions = 0
        self._refused: set[MeshChoice] = set()
        self._composed: dict[Hashable, ComposedStage | None] = {}
        self._solved: dict[Hashable, SolvedStage] = {}
        self._mesh_choices: dict[Shape, tuple[MeshChoice, ...]] = {}

    @property
    def num_solves(self) -> int:
        """Number of solves of layers and of whole stages."""
        return self.layers.num_solves + len(self._solved)

    def mesh_choices(self, shape: Shape) -> tuple[MeshChoice, ...]:
        """Return the choices of deferred axes on a logical mesh of one shape.

        Pure data parallelism defers gradient synchronization whenever it can, without a comparison.
        """
        if shape not in self._mesh_choices:
            choices = self._deferred_choices(shape)
            layers = range(self.ranges.num_layers)
            if not self.options.data_parallel or not all(
                self._front(layer, choice) for choice in choices for layer in layers
            ):
                choices.append(MeshChoice(shape, ()))
            self._mesh_choices[shape] = tuple(choices)
        return self._mesh_choices[shape]

    def _deferred_choices(self, shape: Shape) -> list[MeshChoice]:
        if self.options.mode != "solve":
            return []
        mesh = logical_mesh(shape)
        deferred = candidates(self.ranges.partition.step, mesh, self.options.data_parallel)
        return [
            MeshChoice(shape, axes)
            for axes in deferred
            # Deferring all of several axes is the same as on a mesh of one axis, another shape.
            if self._has_rows(mesh.ways(axes)) and len(axes) < max(len(shape), 2)
        ]

    def _has_rows(self, parts: int) -> bool:
        """Whether a device with one of `parts` parts of a microbatch has several examples.

        A single example is traced differently.
        """
        step = self.ranges.partition.step
        return all(aval_of(step.jaxpr.invars[i]).shape[0] > parts for i in step.batch)

    def _front(self, layer: int, choice: MeshChoice) -> LayerFront | None:
        return self.layers.front(self.ranges.layers[layer], choice)

    def least(self, start: int, stop: int, shapes: Sequence[Shape], parts: int = 1) -> LeastCost:
        """Return lower bounds of the cost of a stage on any of the shapes.

        Args:
            start: first layer.
            stop: the layer after the last one.
            shapes: shapes of logical mesh, all with the same number of devices.
            parts: number of parts into which microbatches are divided further.
        """
        num_devices = prod(shapes[0])
        fastest = {layer: self._single(layer).cheapest for layer in range(start, stop)}
        seconds = sum(cost.seconds for cost in fastest.values()) / num_devices
        common = [layer for layer in fastest if self._kinds[layer] == self._most_common_kind]
        others = [cost.priced.bound for layer, cost in fastest.items() if layer not in common]
        step_seconds = sum(others) / num_devices
        if not common:
            return LeastCost(seconds, step_seconds)
        choices = [choice for shape in shapes for choice in self.mesh_choices(shape)]
        fronts = [front for choice in choices if (front := self._front(common[0], choice))]
        least = inf
        for front in sorted(fronts, key=lambda front: front.bound):
            if front.bound >= least:  # more parts take no less time
                break
            least = min(least, front.least_seconds(parts))
        step_seconds += len(common) * least
        layer_bytes = min((front.least_peak(parts) for front in fronts), default=inf)
        return LeastCost(seconds, step_seconds, common[0], layer_bytes)

    def least_as_program(self, shape: Shape, num_micro_batches: int, limit: float) -> float:
        """Return a lower bound of the seconds of the step as one program that fits in memory.

        Only layers of the most common kind are solved. The others take their least work, and all
        devices share their memory evenly.

        Args:
            shape: shape of the logical mesh.
            num_micro_batches: number of microbatches, at least as many as the step has.
            limit: bound from which on no closer one is looked for.
        """
        kind = self._most_common_kind
        count = self._kinds.count(kind)
        others = [layer for layer, other in enumerate(self._kinds) if other != kind]
        num_devices = prod(shape)
        seconds = sum(self._single(layer).cheapest.priced.bound for layer in others) / num_devices
        share = self.ranges.partition.step.num_micro_batches / num_micro_batches
        room = self.budget - self.ranges.least_program_bytes(others, share) / num_devices
        least = inf
        for choice in self.mesh_choices(shape):
            if front := self._front(kind, choice):
                enough = min(limit, least) - seconds
                bound = least_within_memory(front, count, num_micro_batches, room, enough)
                least = min(least, seconds + bound)
        return least

    @cached_property
    def _most_common_kind(self) -> int:
        return Counter(self._kinds).most_common(1)[0][0]

    def _single(self, layer: int) -> LayerFront:
        """Return the front of a layer on one device, where every layer can run."""
        front = self._front(layer, MeshChoice((1,), ()))
        assert front is not None
        return front

    def composed(
        self,
        start: int,
        stop: int,
        shapes: Sequence[Shape],
        in_flight: int,
        limit: float = inf,
    ) -> ComposedStage | None:
        """Return the cheapest composition that fits; None if there is none below a limit.

        Mesh choices are searched best first: the bound of a mesh choice is refined by one kind of
        layer at a time, the most common kind first.

        Args:
            start: first layer.
            stop: the layer after the last one.
            shapes: shapes of logical mesh to choose from.
            in_flight: number of microbatches in flight.
            limit: seconds of a step; only faster compositions count.
        """
        best: ComposedStage | None = None
        choices = [choice for shape in shapes for choice in self.mesh_choices(shape)]
        choices = [choice for choice in choices if choice not in self._refused]
        kinds = Counter(self._kinds[layer] for layer in range(start, stop)).most_common()
        work = [count * self._single(kind).bound for kind, count in kinds]
        heap = [(sum(work) / prod(choice.shape), 0, n, choice) for n, choice in enumerate(choices)]
        heapify(heap)
        while heap:
            bound, solved, n, choice = heappop(heap)
            if limit <= bound:
                break
            if solved < len(kinds):
                kind, count = kinds[solved]
                if front := self._front(kind, choice):
                    bound += count * front.bound - work[solved] / prod(choice.shape)
                    heappush(heap, (bound, solved + 1, n, choice))
                continue
            price = best.price if best else 0.0
            stage = self._compose(start, stop, choice, in_flight, price, limit)
            if stage is not None and stage.step_seconds < limit:
                best, limit = stage, stage.step_seconds
        return best

    @cached_property
    def _kinds(self) -> list[int]:
        """For each layer, the first layer that is planned alike."""
        keys = [self.layers.kind(graph) for graph in self.ranges.layers]
        return [keys.index(key) for key in keys]

    def _compose(
        self,
        start: int,
        stop: int,
        choice: MeshChoice,
        in_flight: int,
        price: float,
        limit: float,
    ) -> ComposedStage | None:
        """Return a composition on one mesh; None if none fits, or none is faster than the limit.

        See `may_be_faster` for the price.
        """
        layers = [self._front(layer, choice) for layer in range(start, stop)]
        fronts = [front for front in layers if front is not None]
        if len(fronts) < len(layers):
            return None
        key = tuple(map(id, fronts)), in_flight
        if key not in self._composed:
            if not may_be_faster(fronts, in_flight, self.room, limit, price):
                return None
            self._composed[key] = compose(choice, start, fronts, in_flight, self.room)
        stage = self._composed[key]
        if stage is None or stage.start == start:
            return stage
        return replace(stage, start=start)

    def cheapest(
        self, graph: StageGraph, layers: Sequence[int], shapes: Sequence[Shape], in_flight: int
    ) -> SolvedStage:
        """Return the cheapest stage that fits, solved whole.

        Args:
            graph: the stage.
            layers: numbers of its layers.
            shapes: shapes of logical mesh to choose from.
            in_flight: number of microbatches in flight.

        Raises:
            MemoryBudgetError: the stage does not fit.
            ShardingError, InfeasibleError: the options leave no sharding.
            TimeoutError: no sharding was found in time, even in less memory.
        """
        if len(layers) == 1 and len(shapes) == 1:  # a composition would be the stage itself
            return self._solved_once(graph, shapes[0], in_flight, None)
        while composed := self.composed(layers[0], layers[-1] + 1, shapes, in_flight):
            if not self._runs(graph, composed.mesh_choice):
                self.revisions += 1
                self._refused.add(composed.mesh_choice)
                continue
            try:
                return self.solve(graph, composed, in_flight)
            except (MemoryBudgetError, TimeoutError):  # it takes long to use the last of the memory
                self.revisions += 1
                self.room -= _LESS_ROOM * self.budget
                self._composed.clear()
                if self.room < _LEAST_ROOM * self.budget:
                    raise
        # No composition fits, but its memory is an estimate: the stage itself may fit.
        stages: list[SolvedStage] = []
        errors: list[ValueError] = []
        for shape in shapes:
            try:
                stages.append(self._solve_whole(graph, shape, in_flight, None))
            except (ShardingError, InfeasibleError) as error:
                errors.append(error)
        if stages:
            return min(stages, key=lambda stage: (stage.shardings.seconds, stage.shape))
        raise min(
            errors, key=lambda error: error.least if isinstance(error, MemoryBudgetError) else inf
        )

    def _runs(self, graph: StageGraph, choice: MeshChoice) -> bool:
        """Whether the stage runs with the deferred axes of a mesh choice.

        This may take a trace, and seldom fails.
        """
        try:
            check_parts(graph.step, logical_mesh(choice.shape), choice.deferred)
        except MicrobatchError:
            return False
        return True

    def solve(self, graph: StageGraph, composed: ComposedStage, in_flight: int) -> SolvedStage:
        """Return a stage solved whole, with its composition as the start.

        Args:
            graph: the stage.
            composed: a composition of its layers.
            in_flight: number of microbatches in flight.

        Raises:
            MemoryBudgetError: the stage does not fit although its composition does.
        """
        return self._solved_once(graph, composed.mesh_choice.shape, in_flight, composed)

    def _solved_once(
        self, graph: StageGraph, shape: Shape, in_flight: int, composed: ComposedStage | None
    ) -> SolvedStage:
        """Return a stage solved whole, if possible the solution of another stage that is alike.

        The best stage that fits with fewer microbatches in flight is the best one if it still fits.
        """
        key = self.layers.kind(graph), shape, composed and composed.mesh_choice
        for fewer in range(in_flight, 0, -1):
            stage = self._solved.get((*key, fewer))
            if stage is not None and stage.bytes(in_flight) <= self.budget:
                return stage
        start = composed and Start(
            composed.mesh_choice.deferred,
            map(self._specs, self._smaller(composed, in_flight)),
            composed.bound(in_flight, self.budget),
        )
        stage = self._solve_whole(graph, shape, in_flight, start)
        self._solved[*key, in_flight] = stage
        return stage

    def _solve_whole(
        self, graph: StageGraph, shape: Shape, in_flight: int, start: Start | None
    ) -> SolvedStage:
        step = replace(graph.step, in_flight=in_flight)
        costs = self.layers.mesh_costs(shape)
        shardings = plan_shardings(
            step, costs.mesh, self.model, self.options, self.budget, costs, start
        )
        one_in_flight = shardings.peak_bytes - (in_flight - 1) * shardings.saved_bytes
        return SolvedStage(
            shape,
            replace(shardings, peak_bytes=one_in_flight),
            phase_seconds(graph, shardings.eqn_seconds),
        )

    def _smaller(self, composed: ComposedStage, in_flight: int) -> Iterator[ComposedStage]:
        """Yield a composition, then ones of the same layers in less and less memory."""
        yield composed
        fronts = [front for front, _ in composed.layers]
        room = self.room - _LESS_ROOM * self.budget
        while room >= _LEAST_ROOM * self.budget:
            smaller = compose(composed.mesh_choice, composed.start, fronts, in_flight, room)
            if smaller is None:
                return
            yield smaller
            room -= _LESS_ROOM * self.budget

    def _specs(self, composed: ComposedStage) -> dict[Var, Spec]:
        """Return the spec of each value where its layer computes it."""
        specs: dict[Var, Spec] = {}
        for layer, (front, point) in enumerate(composed.layers, composed.start):
            step = self.ranges.layers[layer].step
            received = {step.jaxpr.invars[i] for i in step.received_inputs}
            for var, spec in zip(values_of(step), front.problem.specs(point.priced), strict=True):
                if spec is not None and var not in received:
                    specs[var] = spec
        return specs


@dataclass(frozen=True, slots=True)
class ClusterStageCosts:
    """Costs of stages in every pool of a cluster.

    Attributes:
        pools: costs in each pool, with that pool's devices and memory.
        links: costs of transfers between stages, by numbers of devices in the cluster.
    """

    pools: tuple[StageCosts, ...]
    links: CostModel

    @property
    def ranges(self) -> LayerRanges:
        """The layers and the stages that they can form."""
        return self.pools[0].ranges

    @property
    def options(self) -> ShardingOptions:
        """Limits on shardings."""
        return self.pools[0].options

    @property
    def num_solves(self) -> int:
        """Number of solves of layers and of whole stages."""
        return sum(pool.num_solves for pool in self.pools)

    @property
    def revisions(self) -> int:
        """Number of compositions that did not run, or did not fit, when they were solved whole."""
        return sum(pool.revisions for pool in self.pools)
