"""The cheapest choice that fits into memory: capacity constraints are generated lazily."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import Var

from autopar.ir.spec import Spec
from autopar.sharding.deferred_sync import Axes
from autopar.sharding.heuristic import propagate
from autopar.sharding.options import ShardingOptions
from autopar.sharding.selection_problem import (
    CapacityConstraint,
    InfeasibleError,
    SelectionProblem,
    Solution,
)
from autopar.sharding.solver import solve
from autopar.sharding.step_decisions import Decisions
from autopar.sharding.step_memory import StepMemory

_LOOSENED = 3
"""Number of times that a capacity is enlarged because nothing is within it."""

_CLOSE = 0.005
"""Share of the budget: capacities that differ by less are taken as the same."""


@dataclass(frozen=True, slots=True)
class Start:
    """A known sharding to start from, found for a part of the step.

    Attributes:
        deferred: mesh axes along which gradients are completed once.
        specs: specs of values.
        bound: lower bound of the seconds of every sharding.
    """

    deferred: Axes
    specs: Mapping[Var, Spec]
    bound: float


class MemoryBudgetError(InfeasibleError):
    """No allowed plan fits into the memory budget of a device.

    Attributes:
        budget: bytes that were given.
        least: lower bound of the peak bytes of every allowed plan.
        step: name of the step.
    """

    def __init__(self, budget: float, least: float, step: str = "the step") -> None:
        self.budget, self.least, self.step = budget, least, step
        needs = f"at least {least / 1e9:.3g} GB" if least > budget else "more than that"
        super().__init__(
            f"no plan for {step} fits into {budget / 1e9:.3g} GB per device: every one that is"
            f" allowed needs {needs}. More devices, a smaller batch, more microbatches"
            " (num_micro_batches with autopar.grad), jax.checkpoint around layers, a method that"
            ' shards more (ShardParallel, Zero3Parallel) or offload="auto" would help'
        )


def solve_within_memory(
    memory: StepMemory,
    problem: SelectionProblem,
    budget: float,
    options: ShardingOptions,
    start: Start | None,
) -> tuple[Solution, float]:
    """Return the cheapest choice whose peak memory is within `budget`, and that peak.

    Capacity constraints are generated lazily: one is added at the program point where a solution
    exceeds the budget most, until none does. Few points ever need one. Resharded copies that stay
    alive across a point, and gaps between values, are not variables of its constraint. Half of
    their bytes in the solution that exceeds the budget are subtracted from its bound, as other
    solutions may have fewer; if nothing is within the bound, a larger one is tried, `_LOOSENED`
    times in total. Nothing is solved if even the smallest options exceed the budget.

    Raises:
        MemoryBudgetError: no choice is within `budget`.
    """
    least = memory.lower_bound()
    if least > budget:
        raise MemoryBudgetError(budget, least, memory.step.name)

    def allowed(choice: Sequence[int]) -> bool:
        return math.isinf(budget) or bool(memory.live_bytes(choice).max() <= budget)

    first = cheapest_like(start.specs, memory.decisions, problem) if start else None
    if start and first:
        peak = memory.reserved_bytes(first.choice)
        if peak <= budget and start.bound >= (1 - options.tolerance) * first.objective:
            gap = max(0.0, 1 - start.bound / first.objective) if first.objective else 0.0
            return replace(first, gap=gap), peak
    constraints: dict[int, CapacityConstraint] = {}
    too_small: dict[int, float] = {}
    bound = start.bound if start else -math.inf
    point, most, loosened = 0, budget, 0
    while True:
        constrained = replace(problem, limits=tuple(constraints.values()))
        try:
            solution = solve(
                constrained,
                options.time_limit,
                options.tolerance,
                first.choice if first else None,
                bound,
                allowed,
            )
        except InfeasibleError as error:
            if not constraints:
                raise
            too_small[point] = constraints[point].bound
            loosened += 1
            if loosened > _LOOSENED or most - too_small[point] < _CLOSE * budget:
                raise MemoryBudgetError(budget, least, memory.step.name) from error
            constraints[point] = memory.capacity_constraint(point, (too_small[point] + most) / 2)
            continue
        reserved = memory.reserved_bytes(solution.choice)
        if reserved <= budget:
            return solution, reserved
        point = int(memory.live_bytes(solution.choice).argmax())
        bound = max(bound, solution.bound)
        modelled = memory.capacity_constraint(point, budget).used(solution.choice)
        most = min(modelled, budget)
        tightened = 0.98 * constraints[point].bound if point in constraints else budget
        capacity = min(tightened, most - (reserved - modelled) / 2)
        if capacity <= too_small.get(point, -math.inf) < most:
            capacity = (too_small[point] + most) / 2
        constraints[point] = memory.capacity_constraint(point, capacity)


def propagate_within_memory(
    memory: StepMemory, problem: SelectionProblem, budget: float
) -> tuple[Solution, float]:
    """Return the choice of sharding propagation from the inputs, and its peak memory.

    Raises:
        MemoryBudgetError: the peak exceeds `budget`.
    """
    solution = propagate(problem)
    peak = memory.reserved_bytes(solution.choice)
    if peak > budget:
        raise MemoryBudgetError(budget, peak, memory.step.name)
    return solution, peak


def cheapest_like(
    specs: Mapping[Var, Spec], decisions: Decisions, problem: SelectionProblem
) -> Solution | None:
    """Return the cheapest choice in which values have the given specs, where such options exist.

    None if these options exclude one another.
    """
    allowed = [np.ones(len(cost), bool) for cost in problem.nodes]
    for var, placement in decisions.placements.items():
        if placement is not None and var in specs:
            matches = np.array([spec == specs[var] for spec in placement.specs])
            if (allowed[placement.decision] & matches).any():
                allowed[placement.decision] &= matches
    nodes = [
        np.where(mask, cost, np.inf) for mask, cost in zip(allowed, problem.nodes, strict=True)
    ]
    try:
        solution = solve(SelectionProblem(nodes, problem.edges))
    except InfeasibleError:
        return None
    return replace(solution, objective=problem.cost(solution.choice))
