"""The cheapest choice that fits into memory: capacity constraints are generated lazily."""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    NoFasterError,
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

_COARSE = 0.05
"""Relative gap at which a solve stops until a solution is within the budget."""

_PATIENCE = 3
"""Number of solves that look for a cheaper solution than one within the budget."""


@dataclass(frozen=True, slots=True)
class Start:
    """Known shardings to start from, found for parts of the step.

    Attributes:
        deferred: mesh axes along which gradients are completed once.
        specs: specs of values in each sharding, the fastest one first. They are read until one is
            within the budget.
        bound: lower bound of the seconds of every sharding.
    """

    deferred: Axes
    specs: Iterable[Mapping[Var, Spec]]
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
    limit: float = math.inf,
) -> tuple[Solution, float]:
    """Return the cheapest choice whose peak memory is within `budget`, and that peak.

    Capacity constraints are generated lazily (`_Capacities`) until a solution is within the budget.
    Until then solutions may have a gap of `_COARSE`, because they only show where memory is short.
    From there the search for a cheaper one ends when `_PATIENCE` solutions exceed the budget.
    Nothing is solved if even the smallest options exceed it.

    Args:
        memory: the memory of the step under a choice.
        problem: the selection problem of the step.
        budget: bytes of one device.
        options: tolerance and time limit of solves.
        start: a known sharding to start from.
        limit: seconds of a known plan; only faster choices are looked for.

    Raises:
        MemoryBudgetError: no choice is within `budget`.
        NoFasterError: no choice within `budget` takes less than `limit`.
    """
    least = memory.lower_bound()
    if least > budget:
        raise MemoryBudgetError(budget, least, memory.step.name)

    def allowed(choice: Sequence[int]) -> bool:
        return math.isinf(budget) or bool(memory.live_bytes(choice).max() <= budget)

    bound = start.bound if start else -math.inf
    first, peak = _first_solution(memory, problem, budget, start)
    if first and peak <= budget and bound >= (1 - options.tolerance) * first.objective:
        return replace(first, gap=_gap(first, bound)), peak
    capacities = _Capacities(memory, budget)
    incumbent = first.choice if first else None
    best: tuple[Solution, float] | None = None  # within the budget, with its peak
    patience = _PATIENCE
    while True:
        limits = tuple(capacities.constraints.values())
        is_coarse = bool(limits) and best is None
        tolerance = max(options.tolerance, _COARSE if is_coarse else 0.0)
        constrained = replace(problem, limits=limits)
        try:
            solution = solve(
                constrained,
                options.time_limit,
                tolerance,
                incumbent,
                bound,
                allowed,
                limit=limit,
            )
        except (InfeasibleError, TimeoutError) as error:
            if best:
                return _faster(best, limit)
            if isinstance(error, TimeoutError):
                raise
            if limits and capacities.loosen():
                continue
            if isinstance(error, NoFasterError):
                raise NoFasterError(limit, bool(limits)) from error
            if not limits:
                raise
            raise MemoryBudgetError(budget, least, memory.step.name) from error
        bound = max(bound, solution.bound)
        reserved = memory.reserved_bytes(solution.choice)
        if reserved <= budget:
            solution = replace(solution, is_limited=bool(limits))
            best, incumbent = (solution, reserved), solution.choice
        else:
            capacities.tighten(solution.choice, reserved)
        if best:
            gap = _gap(best[0], bound)
            patience -= not is_coarse
            is_last = reserved <= budget or not patience
            if gap <= options.tolerance or (is_last and not is_coarse):
                return _faster((replace(best[0], gap=gap), best[1]), limit)


def _first_solution(
    memory: StepMemory, problem: SelectionProblem, budget: float, start: Start | None
) -> tuple[Solution | None, float]:
    """Return the fastest solution like a start that is within the budget, and its peak.

    If none is, it is the fastest one of all; None and infinity without any.
    """
    first: tuple[Solution | None, float] = None, math.inf
    for specs in start.specs if start else ():
        solution = cheapest_like(specs, memory.decisions, problem)
        if solution is None:
            continue
        peak = memory.reserved_bytes(solution.choice)
        if peak <= budget:
            return solution, peak
        if first[0] is None:
            first = solution, peak
    return first


def _faster(found: tuple[Solution, float], limit: float) -> tuple[Solution, float]:
    """Return what was found if it takes less than `limit` seconds.

    Raises:
        NoFasterError: it does not.
    """
    solution, _ = found
    if solution.objective >= limit:
        raise NoFasterError(limit, solution.is_limited)
    return found


class _Capacities:
    """The capacity constraints of program points at which solutions have exceeded a budget.

    Few points ever need one. Resharded copies that stay alive across a point, and gaps between
    values, are not variables of its constraint. The bound leaves room for half of their bytes in
    the solution that exceeds the budget, as other solutions may have fewer. If nothing is within
    it, a larger one is tried, `_LOOSENED` times in total.

    Attributes:
        constraints: the constraint of each program point that has one.
    """

    def __init__(self, memory: StepMemory, budget: float) -> None:
        self.constraints: dict[int, CapacityConstraint] = {}
        self._memory, self._budget = memory, budget
        self._too_small: dict[int, float] = {}
        self._point, self._most, self._loosened = 0, budget, 0

    def tighten(self, choice: Sequence[int], reserved: float) -> None:
        """Constrain the point at which a choice that reserves more than the budget has most."""
        self._point = point = int(self._memory.live_bytes(choice).argmax())
        modelled = self._memory.capacity_constraint(point, self._budget).used(choice)
        self._most = most = min(modelled, self._budget)
        enough = self._budget - (reserved - modelled)
        capacity = min((most + enough) / 2, most - _CLOSE * self._budget)
        if capacity <= self._too_small.get(point, -math.inf) < most:
            capacity = (self._too_small[point] + most) / 2
        self._bound(capacity)

    def loosen(self) -> bool:
        """Enlarge the bound that was tightened last; return whether that is worth a try."""
        self._too_small[self._point] = too_small = self.constraints[self._point].bound
        self._loosened += 1
        if self._loosened > _LOOSENED or self._most - too_small < _CLOSE * self._budget:
            return False
        self._bound((too_small + self._most) / 2)
        return True

    def _bound(self, capacity: float) -> None:
        """Bound the bytes at the point that was constrained last."""
        point = self._point
        self.constraints[point] = self._memory.capacity_constraint(point, capacity)


def _gap(solution: Solution, bound: float) -> float:
    """Return the relative distance of a solution from a lower bound."""
    return max(0.0, 1 - bound / solution.objective) if solution.objective else 0.0


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
