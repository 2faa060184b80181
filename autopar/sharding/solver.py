"""Solving choice problems: exact reductions and lower bounds first, HiGHS for what is left."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.sharding.ilp import solve_ilp
from autopar.sharding.presolve import Reduction
from autopar.sharding.selection_problem import InfeasibleError, SelectionProblem, Solution
from autopar.sharding.trws import excess, make_finite, price, settled, sweep, tell_alike, used

_EXACT = 1e-6
"""Relative gap of what HiGHS is left with, where that is to be solved exactly."""

_ROUNDING = 1e-9
"""Relative difference of costs that may be rounding."""

_NO_SHARE = 1e-12
"""Share of a bound that counts as none: a step divided by its square would overflow."""

_ENOUGH = 1e-2
"""Relative gap that will do for a large problem, one of more than `_SMALL` pairs of options; small ones are solved exactly. Sweeps
go on to half of it, and from there while they find choices that are better by a share of `_BETTER`."""

_BETTER = 1e-3

_SMALL = 50_000

_LARGE = 1_000_000
"""Pairs of options beyond which dead ends are dropped before the first sweep: so many come of layers that repeat, and dead ends
of those that are alike are found once. In other problems sweeps do most of it for less."""

_PATIENCE = 4
"""Rounds of sweeps that may find nothing while prices of limits settle."""

_SWEEPS = 3
"""Sweeps there and back between reductions."""


type Allowed = Callable[[Sequence[int]], bool]


def solve(
    problem: SelectionProblem,
    time_limit: float = 60.0,
    tolerance: float = 0.0,
    start: Sequence[int] | None = None,
    bound: float = -math.inf,
    allowed: Allowed = lambda choice: True,
) -> Solution:
    """The cheapest choice, or one that is proven to be within `tolerance` of it, relative.

    Args:
        start: a choice that is known, which need not keep within the limits.
        bound: what every choice is known to cost at least, such as what one costs with fewer limits.
        allowed: what else is asked of a choice. If there is none that is allowed and near enough to the cheapest, the cheapest that
            was found is the answer, for the caller to see what limit it breaks.

    Raises:
        InfeasibleError: every choice holds a forbidden option or pair, or exceeds a limit.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    return _Search(problem, time_limit, tolerance, start, bound, allowed).run()


class _Search:
    """The best choice so far, and what is known to bound all others."""

    def __init__(
        self,
        problem: SelectionProblem,
        time_limit: float,
        tolerance: float,
        start: Sequence[int] | None,
        bound: float,
        allowed: Allowed,
    ) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.deadline = time.monotonic() + time_limit
        self.work = Reduction(problem)
        self.choice: tuple[int, ...] | None = None
        self.best = math.inf
        self.bound, self.allowed = bound, allowed
        self.refused: tuple[float, tuple[int, ...]] = math.inf, ()
        self.prices = np.zeros(len(problem.limits))
        self.scale = np.array([max(abs(limit.bound), 1.0) for limit in problem.limits])
        if start is not None:
            self.take(tuple(start))

    def run(self) -> Solution:
        self.work.reduce(dead_ends=self.work.size > _LARGE)
        self.enough = max(self.tolerance, _ENOUGH if self.work.size > _SMALL else 0.0)
        make_finite(self.work)
        self.tighten()
        self.price(-self.prices)
        core = 0 if self.closed() else len(self.work.costs)
        if not self.work.costs:
            self.offer({})
            self.bound = min(self.best, self.refused[0])  # whatever was dropped is no better
        elif core and not self.within(self.enough) and self.refused[0] >= self.best:
            self.finish()
        if self.refused[0] < self.best and not self.within(self.enough):
            self.best, self.choice = self.refused
        if self.choice is None:
            raise InfeasibleError("no choice of shardings satisfies every requirement")
        gap = max(0.0, self.best - self.bound) / max(abs(self.best), 1e-30)
        return Solution(self.choice, self.best, 0.0 if gap < _ROUNDING else gap, core)

    def tighten(self) -> None:
        """Sweep and reduce until nothing is left or nothing moves."""
        patience = _PATIENCE if self.prices.size else 1
        while (
            self.work.costs
            and not self.within(self.tolerance)
            and patience
            and time.monotonic() < self.deadline
        ):
            size, slack, best = self.work.size, self.best - self.bound, self.best

            def moved(least: float, size: int = size, slack: float = slack) -> bool:
                return (
                    self.work.size < (1 - least) * size
                    or self.best - self.bound < (1 - least) * slack
                )

            for _ in range(_SWEEPS):
                order = sorted(self.work.costs)
                self.look(order)
                self.set_prices(self.look(order[::-1]))
                if self.closed():
                    return
            if self.choice is None and math.isinf(slack):
                self.check_limits()
            self.reduce(dead_ends=self.work.size <= _SMALL and not moved(0.3))
            patience -= not moved(0.05)
            if self.best > (1 - _BETTER) * best and self.within(self.enough / 2):
                break

    def reduce(self, dead_ends: bool) -> None:
        """Reduce at no price: an option that is dearer only for what it uses is no dead end."""
        prices = self.prices
        self.price(-prices)
        self.work.reduce(dead_ends)
        self.price(prices)

    def look(self, order: list[int]) -> np.ndarray:
        """Sweep, and take the choice that this leads to if it is a better one; what is used of each limit above its bound."""
        chosen = sweep(self.work, order, self.best + self.rounding())
        self.bound = max(self.bound, self.work.constant)
        polished = settled(self.work, chosen)
        priced = float(self.prices @ (used(self.work, polished) - self.work.bounds))
        if self.work.constant + excess(self.work, polished) - priced < self.best:
            self.offer(polished)
        return used(self.work, chosen) - self.work.bounds

    def set_prices(self, over: np.ndarray) -> None:
        """Move prices along what was used above bounds, which is a subgradient of the bound (Polyak 1969)."""
        share = over / self.scale
        if np.abs(share).max(initial=0.0) < _NO_SHARE:
            return
        target = self.best if self.choice else self.work.constant + 0.1 * abs(self.work.constant)
        step = max(0.0, target - self.work.constant) * share / (share @ share) / self.scale
        self.price(np.maximum(-self.prices, step))

    def offer(self, core: dict[int, int]) -> None:
        """Take a choice of the core, see `take`."""
        self.take(self.work.complete(core))

    def take(self, choice: tuple[int, ...]) -> None:
        """Take a choice if it is allowed and better than the best so far; of those that are not, remember the cheapest."""
        cost = self.problem.cost(choice)
        if cost >= self.best or not self.problem.fits(choice):
            return
        if self.allowed(choice):
            self.best, self.choice = cost, choice
        elif cost < self.refused[0]:
            self.refused = cost, choice

    def closed(self) -> bool:
        return self.within(0.0)

    def within(self, tolerance: float) -> bool:
        return self.choice is not None and self.best - self.bound <= max(
            self.rounding(), tolerance * abs(self.best)
        )

    def rounding(self) -> float:
        return _ROUNDING * abs(self.best) + 1e-12

    def price(self, change: np.ndarray) -> None:
        self.prices = self.prices + change
        if change.any():
            price(self.work, change)

    def finish(self) -> None:
        """Leave the rest to HiGHS."""
        self.work.reduce()
        tell_alike(self.work, self.best)
        gap, rest = _EXACT, self.best - self.work.constant
        if (
            self.enough and math.isfinite(rest) and rest > 0
        ):  # HiGHS counts a gap as a share of what is left
            gap = max(gap, self.enough * min(abs(self.best) / rest, 50.0))
        try:
            chosen, bound = solve_ilp(
                self.work.rest(), max(1.0, self.deadline - time.monotonic()), gap
            )
        except (InfeasibleError, TimeoutError):
            if self.choice is None:
                raise
            return
        self.bound = max(self.bound, self.work.constant + bound)
        self.offer(dict(zip(self.work.costs, chosen, strict=True)))

    def check_limits(self) -> None:
        """See for each limit what must be used at least: more than its bound, or there is a choice to start from.

        Raises:
            InfeasibleError: a limit can't be kept, whatever else is given up for it. (HiGHS takes long to see that.)
        """
        for limit in self.problem.limits:
            nodes = [
                np.where(np.isfinite(cost), limit.uses.get(i, 0.0), np.inf)
                for i, cost in enumerate(self.problem.nodes)
            ]
            edges = {
                pair: np.where(np.isfinite(cost), limit.pairs.get(pair, 0.0), np.inf)
                for pair, cost in self.problem.edges.items()
            }
            least = solve(
                SelectionProblem(nodes, edges), max(1.0, self.deadline - time.monotonic())
            )
            if least.objective - (least.gap or 0.0) * abs(
                least.objective
            ) > limit.bound + 1e-6 * abs(limit.bound):
                raise InfeasibleError("no choice of shardings keeps within every limit")
            cost = self.problem.cost(least.choice)
            if cost < self.best and self.problem.fits(least.choice):
                self.best, self.choice = cost, least.choice
