"""Sharding, recomputation and offload of a step, chosen in turn until none makes it faster.

Three shardings are the starting points: the fastest without a budget, the fastest within it that
keeps everything, and the fastest within it of the step that recomputes and offloads as much as
saves memory. For each, the cheapest recomputation and offload that fit are chosen, the step is
rewritten and sharded again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.recompute.recompute_candidates import (
    ChosenEquations,
    RecomputeCandidates,
    candidates,
)
from autopar.recompute.recompute_ilp import cheapest_recomputation, least_memory
from autopar.recompute.rewriting import recompute
from autopar.sharding.equation_seconds import repeats_in_step
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import ShardingOptions
from autopar.sharding.plan_shardings import Shardings, plan_shardings
from autopar.sharding.solve_within_memory import MemoryBudgetError, cheapest_like
from autopar.sharding.step_memory import StepMemory
from simulator.costs.cost_model import CostModel
from simulator.work import Kernel

_ROUNDS = 6
"""Maximum number of recomputations that are chosen from one starting point."""

_CLOSE = 0.005
"""Share of the budget below which a difference of bytes is not worth another round."""

_NEARLY_FITS = 1.015
"""Ratio of a sharding's bytes to the budget up to which one that fits is looked for.

Beyond it, shardings that fit are slow and take long to find.
"""


@dataclass(frozen=True, eq=False)
class Recomputing:
    """A step with its recomputation, offload and sharding.

    Attributes:
        equations: the equations of the traced step that are repeated or offloaded.
        step: the step that repeats and offloads them.
        shardings: its sharding.
    """

    equations: ChosenEquations
    step: StepGraph
    shardings: Shardings


def shard_recomputing(
    step: StepGraph,
    mesh: LogicalMesh,
    model: CostModel,
    options: ShardingOptions,
    budget: float,
    repeats: bool = True,
    offloads: bool = False,
) -> Recomputing:
    """Return the fastest recomputation, offload and sharding that fit into `budget` bytes.

    Args:
        step: the traced step.
        mesh: the logical mesh.
        model: the cost model of the mesh's devices and network.
        options: what a sharding may do.
        budget: the bytes of one device that the step may use.
        repeats: whether the backward pass may compute values again.
        offloads: whether it may fetch values from host memory.

    Raises:
        MemoryBudgetError: Nothing that was tried fits.
        MissingRuleError, ShardingError, InfeasibleError, TimeoutError: See `plan_shardings`.
    """
    search = _RecomputeSearch(step, mesh, model, options, budget)
    free = search.sharded(step, math.inf)
    if free.peak_bytes <= budget:
        return Recomputing(ChosenEquations(), step, free)
    best: Recomputing | None = None
    for search.repeats, search.offloads in dict.fromkeys([(repeats, False), (repeats, offloads)]):
        for start, slack in search.starts(free):
            for found in search.improved(start, slack):
                if found.shardings.seconds < search.fastest:
                    best, search.fastest = found, found.shardings.seconds
    if best is None:
        assert search.error is not None
        raise search.error
    return best


def least_bytes(error: MemoryBudgetError | TimeoutError) -> float:
    """Return the bytes that a step needs which does not fit; 0 if they are unknown."""
    return error.least if isinstance(error, MemoryBudgetError) else 0.0


class _RecomputeSearch:
    """The state of a search; see `shard_recomputing` for the arguments.

    Attributes:
        repeats: whether values may be computed again.
        offloads: whether they may be offloaded.
        error: the error of the attempt that came closest to the budget, or that ran out of time.
        fastest: the seconds of the fastest step so far.
        runs: how often each equation runs in a step.
    """

    def __init__(
        self,
        step: StepGraph,
        mesh: LogicalMesh,
        model: CostModel,
        options: ShardingOptions,
        budget: float,
    ) -> None:
        self.step = step
        self.mesh = mesh
        self.model = model
        self.options = options
        self.budget = budget
        self.repeats = True
        self.offloads = False
        self.costs = MeshCosts(mesh, model, options.forbidden)
        self.error: MemoryBudgetError | TimeoutError | None = None
        self.fastest = math.inf
        self.runs = repeats_in_step(step)

    def sharded(self, step: StepGraph, budget: float) -> Shardings:
        """Return the fastest sharding of a step within a budget, with the specs of its values."""
        return plan_shardings(
            step, self.mesh, self.model, self.options, budget, self.costs, with_specs=True
        )

    def attempt(self, equations: ChosenEquations, is_first: bool = True) -> Recomputing | None:
        """Return the step with equations repeated or offloaded, and sharded, if it fits.

        None, too, if no sharding that fits can be faster than what was found before, or if none is
        found in time.

        Args:
            equations: the equations.
            is_first: whether it is the first from a starting point. The fastest sharding of others
                has to fit nearly.
        """
        step = recompute(self.step, equations.repeated, equations.offloaded)
        try:
            if not is_first:
                free = self.sharded(step, math.inf)
                if free.peak_bytes <= self.budget:
                    return Recomputing(equations, step, free)
                if free.peak_bytes > _NEARLY_FITS * self.budget or free.seconds >= self.fastest:
                    return None
            return Recomputing(equations, step, self.sharded(step, self.budget))
        except (MemoryBudgetError, TimeoutError) as error:
            if self.error is None or least_bytes(error) < least_bytes(self.error):
                self.error = error
            return None

    def starts(self, free: Shardings) -> Iterator[tuple[Shardings | Recomputing, float]]:
        """Yield the starting points, from the sharding that is the fastest without a budget.

        With each come the bytes by which the recomputation problem overestimates its peak.
        """
        yield free, 0.0
        without = self.attempt(ChosenEquations())
        if without is not None:
            yield without, 0.0
        found = self.candidates(free)
        if found is not None:
            least = least_memory(found.problem, rounds=6)
            lean = self.attempt(found.equations(least.choice))
            if lean is not None:
                yield lean, max(0.0, least.peak_bytes - lean.shardings.peak_bytes)

    def improved(self, start: Shardings | Recomputing, slack: float) -> Iterator[Recomputing]:
        """Yield what fits, from a starting point: each is faster than the one before.

        Args:
            start: the starting point.
            slack: the bytes by which the problem may exceed the budget at first. With each result
                it becomes what the problem overestimates. Where that is too much, half is tried.
        """
        shardings = start
        fastest = math.inf
        if isinstance(start, Recomputing):
            yield start
            shardings = start.shardings
            fastest = shardings.seconds
        assert isinstance(shardings, Shardings)
        tried = {start.equations} if isinstance(start, Recomputing) else set[ChosenEquations]()
        enough = 0.0
        for _ in range(_ROUNDS):
            found = self.candidates(shardings)
            chosen = found and cheapest_recomputation(found.problem, self.budget + slack)
            if found is None or chosen is None:
                return
            equations = found.equations(chosen.choice)
            if equations in tried:
                return
            result = self.attempt(equations, is_first=not tried)
            tried.add(equations)
            if result is not None and result.shardings.seconds < fastest:
                yield result
                shardings, fastest = result.shardings, result.shardings.seconds
                enough = slack
                slack = max(slack, chosen.peak_bytes - shardings.peak_bytes)
            elif slack > enough + _CLOSE * self.budget:
                slack = (enough + slack) / 2
            elif result is None and slack <= 0:  # the problem underestimates its peak
                slack -= 0.02 * self.budget
            else:
                return

    def candidates(self, shardings: Shardings) -> RecomputeCandidates | None:
        """Return the recomputation problem of the traced step under known shardings.

        None if they exclude one another in the traced step.
        """
        decisions = enumerate_decisions(self.step, self.costs, self.options, shardings.deferred)
        solution = cheapest_like(shardings.specs, decisions, decisions.problem())
        if solution is None:
            return None
        memory = StepMemory(self.step, decisions, self.mesh)
        seconds = decisions.seconds_by_equation(solution.choice, len(self.step.jaxpr.eqns))
        return candidates(
            memory,
            solution.choice,
            [sum(parts) for parts in seconds],
            self.repeats,
            self.host_seconds if self.offloads else None,
        )

    def host_seconds(self, number: int, num_bytes: float) -> float:
        """Return the seconds in a step to copy the result of an equation to or from the host."""
        copy = Kernel("", "host copy", 0.0, num_bytes)
        return self.runs[number] * self.model.kernel(copy)
