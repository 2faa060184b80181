"""What stages cost: the intra-operator solve of each, done once for all that are planned alike."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.devices import logical_mesh
from autopar.microbatch import MicrobatchError
from autopar.pipeline.layer_ranges import graph_key
from autopar.pipeline.stage_graph import StageGraph
from autopar.sharding.costs import MeshCosts
from autopar.sharding.deferral import check_parts
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.planner import Shardings, plan_shardings
from autopar.sharding.problem import InfeasibleError
from simulator.costs import CostModel
from simulator.program import Phase

type Shape = tuple[int, ...]


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
    def bound(self) -> float:
        """The share of its cost that the cheapest sharding may have, as far as was proven."""
        return 1.0 - (self.shardings.gap or 0.0)

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


class StageSolver:
    """Solves stages, and remembers what it solved.

    Attributes:
        num_solves: how many solves that took; solve_seconds: their time.
    """

    def __init__(self, costs: CostModel, budget: float) -> None:
        self.costs, self.budget = costs, budget
        self.num_solves = 0
        self.solve_seconds = 0.0
        self._mesh_costs: dict[Hashable, MeshCosts] = {}
        self._known: dict[Hashable, SolvedStage | ShardingError | InfeasibleError] = {}

    def cheapest(
        self,
        graph: StageGraph,
        shape: Shape,
        options: ShardingOptions = AUTO,
        in_flight: int | None = None,
        check: bool = False,
    ) -> SolvedStage:
        """The cheapest sharding of a stage that holds so many microbatches; None: in unlimited memory.

        Args:
            check: make sure that it runs with what is deferred; that takes a trace, and fails seldom.

        Raises:
            MemoryBudgetError: it does not fit.
            ShardingError, InfeasibleError: the options leave nothing.
        """
        found = self._fitting(graph, shape, options, in_flight, False)
        if check:
            try:
                check_parts(graph.step, logical_mesh(shape), found.shardings.deferred)
            except MicrobatchError:
                return self._fitting(graph, shape, options, in_flight, True)
        return found

    def _fitting(
        self, graph: StageGraph, shape: Shape, options: ShardingOptions, in_flight: int | None, check: bool
    ) -> SolvedStage:
        free = self._solve(graph, shape, options, None, check)
        if in_flight is None or free.bytes(in_flight) <= self.budget:
            return free
        return self._solve(graph, shape, options, in_flight, check)

    def variants(
        self, graph: StageGraph, shape: Shape, options: ShardingOptions, most_in_flight: int
    ) -> list[SolvedStage]:
        """Shardings of a stage for every number of microbatches it may hold: cheap ones for few, and ones that save memory."""
        found: list[SolvedStage] = []
        in_flight = most_in_flight
        while in_flight:
            if not any(each.bytes(in_flight) <= self.budget for each in found):
                with suppress(ShardingError, InfeasibleError):  # nothing fits with so many
                    found.append(self.cheapest(graph, shape, options, in_flight))
            in_flight //= 2
        return found

    def _solve(
        self, graph: StageGraph, shape: Shape, options: ShardingOptions, in_flight: int | None, check: bool
    ) -> SolvedStage:
        names = (graph.step.in_paths, graph.step.out_paths) if options.pins else ()
        key = (graph_key(graph), shape, repr(options), names, in_flight, check)
        if key not in self._known:
            self._known[key] = self._found(graph, shape, options, in_flight, check)
        found = self._known[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _found(
        self, graph: StageGraph, shape: Shape, options: ShardingOptions, in_flight: int | None, check: bool
    ) -> SolvedStage | ShardingError | InfeasibleError:
        self.num_solves += 1
        mesh = logical_mesh(shape)
        key = shape, options.forbidden
        costs = self._mesh_costs.setdefault(key, MeshCosts(mesh, self.costs, options.forbidden))
        try:
            if in_flight is None:
                found = plan_shardings(graph.step, mesh, self.costs, options, costs=costs, check=check)
            else:
                step = replace(graph.step, in_flight=in_flight)
                found = plan_shardings(step, mesh, self.costs, options, self.budget, costs, check)
                found = replace(found, peak_bytes=found.peak_bytes - (in_flight - 1) * found.held_bytes)
        except (ShardingError, InfeasibleError) as error:
            return error
        self.solve_seconds += found.solve_seconds
        return SolvedStage(shape, found, phase_seconds(graph, found))


def phase_seconds(graph: StageGraph, found: Shardings) -> dict[Phase, float]:
    """Seconds of each phase: of one microbatch; of the update, of a step.

    Equations that several phases compute count in the first; those of no task bring results where the next step wants them.
    """
    phase_of: dict[int, Phase] = {}
    for task, eqns in graph.tasks.items():
        for number, _ in eqns:
            phase_of.setdefault(number, task.phase)
    body = {number for number, _ in graph.step.microbatching.body} if graph.step.microbatching else set()
    seconds: dict[Phase, float] = {task.phase: 0.0 for task in graph.tasks}
    for number, cost in enumerate(found.eqn_seconds):
        phase = phase_of.get(number, "U")
        count = graph.step.num_micro_batches if number in body else 1
        seconds[phase] = seconds.get(phase, 0.0) + cost / count
    return seconds
