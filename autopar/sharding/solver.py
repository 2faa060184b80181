"""Solver of selection problems: reductions, lower bounds, branching, and HiGHS for what is left."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.progress import count_progress, progress_part
from autopar.sharding.equal_costs import make_finite, merge_equal_rows, price, used
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.message_passing import MessagePassing
from autopar.sharding.presolve import Reduction
from autopar.sharding.selection_problem import (
    InfeasibleError,
    NoFasterError,
    SelectionProblem,
    Solution,
)

_EXACT = 1e-6
"""Relative gap at which HiGHS may stop if the problem is to be solved exactly."""

_ROUNDING = 1e-9
"""Relative difference of costs that may be rounding."""

_NO_SHARE = 1e-12
"""Relative excess over a bound that counts as none: dividing by its square would overflow."""

_ENOUGH = 1e-2
"""Relative gap at which a problem of more than `_SMALL` pairs of options counts as solved.

Smaller problems are solved exactly. Sweeps go on to half of this gap, and from there as long as
they find choices that are better by a share of `_BETTER`.
"""

_BETTER = 1e-3

_SMALL = 50_000

_LARGE = 1_000_000
"""Number of pairs of options above which dead ends are dropped before the first sweep.

So many pairs come from layers that repeat, whose dead ends are found once. In other problems sweeps
drop most options in less time.
"""

_BRANCHING = 10_000
"""Number of pairs of options above which a problem is branched, which takes less time than HiGHS.

Memory limits couple all decisions, so that problems with limits are left to HiGHS.
"""

_TOO_LARGE = 100_000
"""Number of pairs of options from which on HiGHS only looks for a first choice.

It does not improve a choice of so large a problem in time, and exceeds its time limit by minutes.
"""

_PATIENCE = 4
"""Rounds of sweeps without progress, while prices of constraints converge."""

_SWEEPS = 3
"""Forward and backward sweeps between reductions."""

_SWEEPING = 0.6
"""Share of sweeps in the progress of a solve; HiGHS has the rest."""


type Allowed = Callable[[Sequence[int]], bool]


def solve(
    problem: SelectionProblem,
    time_limit: float = 60.0,
    tolerance: float = 0.0,
    start: Sequence[int] | None = None,
    bound: float = -math.inf,
    allowed: Allowed = lambda choice: True,
    branching_gap: float = 0.0,
    limit: float = math.inf,
) -> Solution:
    """Return the cheapest choice, or one that is proven to be within `tolerance` of it.

    Presolve and sweeps (`presolve`, `message_passing`) reduce the problem. A large core that
    remains is branched: its heaviest decision takes each of its options in turn. HiGHS solves a
    small core.

    Args:
        problem: costs in seconds, with capacity constraints.
        time_limit: seconds.
        tolerance: relative gap at which the search stops.
        start: a known choice, which may violate constraints.
        bound: known lower bound of all choices, as the cost of one with fewer constraints.
        allowed: a further requirement. If no allowed choice is found near the optimum, the cheapest
            choice found is returned, so that the caller sees which constraint it violates.
        branching_gap: relative gap up to which a problem is not branched, and not left to HiGHS.
            With such a gap, the parts of a branched problem are not branched any further.
        limit: cost of a choice that is known elsewhere. Cheaper ones are looked for; one that is
            found may be dearer by `tolerance`, or by a percent.

    Raises:
        InfeasibleError: every choice has an infinite cost or violates a constraint.
        NoFasterError: every other choice costs at least `limit`.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    # The search stops within its tolerance of the limit, as of a choice.
    dearer = limit * (1 + max(tolerance, _ENOUGH))
    search = _SelectionSearch(problem, time_limit, tolerance, start, bound, allowed, dearer)
    search.branching_gap = branching_gap
    try:
        return search.run()
    except InfeasibleError as error:
        if math.isinf(limit):
            raise
        raise NoFasterError(limit, is_limited=bool(problem.limits)) from error


class Solver:
    """Solves a selection problem several times, each time from where the last search ended.

    A rough solution costs nothing then if a closer one follows.

    Attributes:
        problem: the problem.
    """

    def __init__(self, problem: SelectionProblem) -> None:
        self.problem = problem
        self._search: _SelectionSearch | None = None
        self._solution: Solution | None = None

    def solve(
        self, time_limit: float, tolerance: float = 0.0, branching_gap: float = 0.0
    ) -> Solution:
        """Return the cheapest choice within `tolerance`; see the function `solve`."""
        if self._solution and (self._solution.gap or 0.0) <= tolerance:
            return self._solution
        search = self._search or _SelectionSearch(self.problem, time_limit, tolerance)
        search.tolerance, search.branching_gap = tolerance, branching_gap
        search.deadline = time.monotonic() + time_limit
        self._solution = search.run()
        self._search = search if self._solution.gap else None  # an optimum is not continued
        return self._solution


class _SelectionSearch:
    """The state of a search: the best choice, and the lower bound of all others.

    A `limit` is the cost of a choice that is known elsewhere; only cheaper ones are looked for.

    Attributes:
        work: the reduced problem.
        is_large: whether more than `_SMALL` pairs of options were left by the first reduction.
        choice: the best allowed choice.
        best: its cost, or the limit as long as there is none.
        bound: lower bound of all choices.
        refused: cost of the cheapest choice that is not allowed, and that choice.
        prices: price of each capacity constraint.
        scale: unit of each constraint.
    """

    def __init__(
        self,
        problem: SelectionProblem,
        time_limit: float,
        tolerance: float,
        start: Sequence[int] | None = None,
        bound: float = -math.inf,
        allowed: Allowed = lambda choice: True,
        limit: float = math.inf,
    ) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.branching_gap = 0.0
        self.is_large = False
        self.deadline = time.monotonic() + time_limit
        self.work = Reduction(problem)
        self.choice: tuple[int, ...] | None = None
        self.best = limit
        self.bound, self.allowed = bound, allowed
        self.refused: tuple[float, tuple[int, ...]] = math.inf, ()
        self.prices = np.zeros(len(problem.limits))
        self.scale = np.array([max(abs(limit.bound), 1.0) for limit in problem.limits])
        if start is not None:
            self.take(tuple(start))

    def run(self) -> Solution:
        """Return the solution."""
        core = self.search()
        if self.refused[0] < self.best and not self.within(self.enough):
            self.best, self.choice = self.refused
        if self.choice is None:
            raise InfeasibleError("no choice of shardings satisfies every requirement")
        gap = self.gap()
        return Solution(self.choice, self.best, 0.0 if gap < _ROUNDING else gap, core)

    def search(self) -> int:
        """Look for the best choice; return the decisions that sweeps leave open."""
        self.work.reduce(dead_ends=self.work.size > _LARGE)
        self.is_large = self.is_large or self.work.size > _SMALL
        self.enough = max(self.tolerance, _ENOUGH if self.is_large else 0.0)
        make_finite(self.work)
        self.tighten()
        self.price(-self.prices)
        core = 0 if self.closed() else len(self.work.costs)
        if not self.work.costs:
            self.offer({})
            self.bound = min(self.best, self.refused[0])  # options that were dropped are no better
        elif (
            core
            and not self.within(max(self.enough, self.branching_gap))
            and self.refused[0] >= self.best
        ):
            self.finish()
        return core

    def gap(self) -> float:
        """Return the relative distance of the best choice from the bound."""
        return max(0.0, self.best - self.bound) / max(abs(self.best), 1e-30)

    def count_gap(self, first: float) -> None:
        """Count progress by the orders of magnitude that the gap has come down from the first."""
        least = max(self.tolerance, self.enough / 2, _EXACT)
        if math.isfinite(first) and first > least:
            share = math.log(first / max(self.gap(), least)) / math.log(first / least)
            count_progress(_SWEEPING * share, 1)

    def tighten(self) -> None:
        """Sweep and reduce until the problem is solved or makes no progress."""
        patience = _PATIENCE if self.prices.size else 1
        first_gap = None
        while (
            self.work.costs
            and not self.within(self.tolerance)
            and patience
            and time.monotonic() < self.deadline
        ):
            size, slack, best = self.work.size, self.best - self.bound, self.best

            def progressed(least: float, size: int = size, slack: float = slack) -> bool:
                return (
                    self.work.size < (1 - least) * size
                    or self.best - self.bound < (1 - least) * slack
                )

            self.pass_messages()
            if self.closed():
                return
            if self.choice is None and math.isinf(slack):
                self.check_limits()
            self.reduce(dead_ends=self.work.size <= _SMALL and not progressed(0.3))
            patience -= not progressed(0.05)
            first_gap = first_gap or self.gap()
            self.count_gap(first_gap)
            if self.best > (1 - _BETTER) * best and self.within(self.enough / 2):
                break

    def reduce(self, dead_ends: bool) -> None:
        """Reduce without prices, with which an option may only look like a dead end."""
        prices = self.prices
        self.price(-prices)
        self.work.reduce(dead_ends)
        self.price(prices)

    def pass_messages(self) -> None:
        """Sweep forward and backward several times, with new prices in between."""
        passing = MessagePassing(self.work)
        for done in range(1, _SWEEPS + 1):
            self.sweep(passing, forward=True)
            exceeded = self.sweep(passing, forward=False)
            if not self.prices.size and done < _SWEEPS and not self.closed():
                continue
            passing.write_back()
            self.set_prices(exceeded)
            if self.closed() or done == _SWEEPS:
                return
            passing = MessagePassing(self.work)

    def sweep(self, passing: MessagePassing, forward: bool) -> np.ndarray:
        """Sweep once, and take the choice that results if it is better.

        Returns:
            By how much the choice exceeds the bound of each capacity constraint.
        """
        chosen = passing.sweep(forward, self.best + self.rounding())
        self.bound = max(self.bound, passing.constant)
        improved = passing.local_optimum(chosen)
        cost = passing.cost(improved)
        if self.prices.size:
            cost -= float(self.prices @ self.exceeded(passing, improved))
        if cost < self.best:
            self.offer(passing.numbered(improved))
        return self.exceeded(passing, chosen) if self.prices.size else np.zeros(0)

    def exceeded(self, passing: MessagePassing, choice: np.ndarray) -> np.ndarray:
        """Return by how much a choice exceeds the bound of each capacity constraint."""
        return used(self.work, passing.numbered(choice)) - self.work.bounds

    def set_prices(self, exceeded: np.ndarray) -> None:
        """Move prices along the excess, which is a subgradient of the bound (Polyak 1969)."""
        share = exceeded / self.scale
        if np.abs(share).max(initial=0.0) < _NO_SHARE:
            return
        target = (
            self.best
            if math.isfinite(self.best)
            else self.work.constant + 0.1 * abs(self.work.constant)
        )
        step = max(0.0, target - self.work.constant) * share / (share @ share) / self.scale
        self.price(np.maximum(-self.prices, step))

    def offer(self, core: dict[int, int]) -> None:
        """Take a choice of the remaining decisions, see `take`."""
        self.take(self.work.complete(core))

    def take(self, choice: tuple[int, ...]) -> None:
        """Keep a choice if it is allowed and better than the best one.

        Of choices that are not allowed, the cheapest is kept as `refused`.
        """
        cost = self.problem.cost(choice)
        if cost >= self.best or not self.problem.fits(choice):
            return
        if self.allowed(choice):
            self.best, self.choice = cost, choice
        elif cost < self.refused[0]:
            self.refused = cost, choice

    def closed(self) -> bool:
        """Return whether the best choice is optimal."""
        return self.within(0.0)

    def within(self, tolerance: float) -> bool:
        """Return whether the best choice is within a relative gap of the bound."""
        return math.isfinite(self.best) and self.best - self.bound <= max(
            self.rounding(), tolerance * abs(self.best)
        )

    def rounding(self) -> float:
        """Return the seconds that may be rounding."""
        return _ROUNDING * abs(self.best) + 1e-12

    def price(self, change: np.ndarray) -> None:
        """Change the prices of capacity constraints."""
        self.prices = self.prices + change
        if change.any():
            price(self.work, change)

    def finish(self) -> None:
        """Solve the remaining problem: branch it if it is large, or else use HiGHS."""
        self.work.reduce()
        if not self.problem.limits and self.work.size > _BRANCHING:
            self.branch()
            return
        if self.choice is not None and self.work.size > _TOO_LARGE:
            return
        merge_equal_rows(self.work, self.best)
        if self.work.size > _SMALL:
            count_progress(_SWEEPING, 1, f"solving {len(self.work.costs)} decisions with HiGHS")
        rest = self.work.rest()
        # A decision with a single option has the cost of the decisions that are made, so that the
        # gap of HiGHS is relative to the whole cost.
        nodes = [*rest.nodes, np.array([self.work.constant])]
        try:
            chosen, bound = solve_ilp(
                replace(rest, nodes=nodes),
                max(1.0, self.deadline - time.monotonic()),
                max(_EXACT, self.enough),
            )
        except (InfeasibleError, TimeoutError):
            if self.choice is None:
                raise
            return
        self.bound = max(self.bound, bound)
        self.offer(dict(zip(self.work.costs, chosen[:-1], strict=True)))

    def branch(self) -> None:
        """Solve the remaining problem once for each option of its heaviest decision.

        Costs of other decisions then depend on that option alone, so that few sweeps close the gap
        that the relaxation of the whole problem has.

        Raises:
            TimeoutError: there is no time left, and no choice was found.
        """
        problem, core = self.work.rest(), list(self.work.costs)
        pairs = [sum(cost.size for cost in self.work.edges[i].values()) for i in core]
        decision = pairs.index(max(pairs))
        options = np.argsort(problem.nodes[decision])
        bound = math.inf
        for done, option in enumerate(options):
            if time.monotonic() > self.deadline:
                if self.choice is None:
                    raise TimeoutError("no sharding plan was found within the time limit; raise it")
                return
            nodes = list(problem.nodes)
            nodes[decision] = np.full(len(options), math.inf)
            nodes[decision][option] = problem.nodes[decision][option] + self.work.constant
            part = self.part(SelectionProblem(nodes, problem.edges), core)
            first = _SWEEPING + (1 - _SWEEPING) * done / len(options)
            with progress_part(first, first + (1 - _SWEEPING) / len(options)):
                try:
                    part.search()
                except InfeasibleError:
                    continue
                except TimeoutError:
                    if self.choice is None:
                        raise
                    return
            bound = min(bound, part.bound)
            for choice in (part.choice, part.refused[1]):
                if choice:
                    self.offer(dict(zip(core, choice, strict=True)))
        self.bound = max(self.bound, min(self.best, bound))

    def part(self, problem: SelectionProblem, core: list[int]) -> "_SelectionSearch":
        """Return a search for a better choice of the decisions `core`; all others are fixed.

        Args:
            problem: costs of these decisions, with the cost of all others added.
            core: their numbers in `work`.
        """
        part = _SelectionSearch(
            problem,
            self.deadline - time.monotonic(),
            self.tolerance,
            allowed=lambda choice: self.allowed(
                self.work.complete(dict(zip(core, choice, strict=True)))
            ),
            limit=self.best,
        )
        part.branching_gap = math.inf if self.branching_gap else 0.0
        return part

    def check_limits(self) -> None:
        """Minimize the use of each capacity constraint, for a first choice that satisfies it.

        HiGHS takes long to prove that a constraint can't be satisfied.

        Raises:
            InfeasibleError: no choice satisfies one of the constraints.
        """
        for constraint in self.problem.limits:
            nodes = [
                np.where(np.isfinite(cost), constraint.uses.get(i, 0.0), np.inf)
                for i, cost in enumerate(self.problem.nodes)
            ]
            edges = {
                pair: np.where(np.isfinite(cost), constraint.pairs.get(pair, 0.0), np.inf)
                for pair, cost in self.problem.edges.items()
            }
            least = solve(
                SelectionProblem(nodes, edges), max(1.0, self.deadline - time.monotonic())
            )
            lower_bound = least.objective - (least.gap or 0.0) * abs(least.objective)
            if lower_bound > constraint.bound + 1e-6 * abs(constraint.bound):
                raise InfeasibleError("no choice of shardings keeps within every limit")
            cost = self.problem.cost(least.choice)
            if cost < self.best and self.problem.fits(least.choice):
                self.best, self.choice = cost, least.choice
