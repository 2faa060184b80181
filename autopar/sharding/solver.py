"""Solving choice problems: exact reductions and lower bounds first, HiGHS for what is left."""

import math
import time

import numpy as np

from autopar.sharding.bounds import cap, excess, make_finite, price, sweep, used
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.problem import ChoiceProblem, InfeasibleError, Solution
from autopar.sharding.reduction import Reduction

_ROUNDING = 1e-9
"""Relative difference of costs that may be rounding."""

_SWEEPS = 3
"""Sweeps there and back between reductions."""


def solve(problem: ChoiceProblem, time_limit: float = 60.0) -> Solution:
    """The cheapest choice.

    Raises:
        InfeasibleError: every choice holds a forbidden option or pair, or exceeds a limit.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    return _Search(problem, time_limit).run()


class _Search:
    """The best choice so far, and what is known to bound all others."""

    def __init__(self, problem: ChoiceProblem, time_limit: float) -> None:
        self.problem = problem
        self.deadline = time.monotonic() + time_limit
        self.work = Reduction(problem)
        self.choice: tuple[int, ...] | None = None
        self.best = math.inf
        self.bound = -math.inf
        self.prices = np.zeros(len(problem.limits))

    def run(self) -> Solution:
        self.work.reduce(dead_ends=False)
        make_finite(self.work)
        self.tighten()
        self.price(-self.prices)
        core = 0 if self.closed() else len(self.work.costs)
        if core:
            self.finish()
        elif not self.work.costs:
            self.offer({})
            self.bound = self.best  # whatever was dropped is no better
        if self.choice is None:
            raise InfeasibleError("no choice of shardings satisfies every requirement")
        gap = max(0.0, self.best - self.bound) / max(abs(self.best), 1e-30)
        return Solution(self.choice, self.best, 0.0 if gap < _ROUNDING else gap, core)

    def tighten(self) -> None:
        """Sweep and reduce until nothing is left or nothing moves."""
        while self.work.costs and not self.closed() and time.monotonic() < self.deadline:
            size, slack = self.work.size, self.best - self.bound

            def moved(least: float, size: int = size, slack: float = slack) -> bool:
                return self.work.size < (1 - least) * size or self.best - self.bound < (1 - least) * slack

            for _ in range(_SWEEPS):
                order = sorted(self.work.costs)
                self.look(order)
                self.look(order[::-1])
            self.work.reduce(dead_ends=not moved(0.3))
            if not moved(0.05):
                return

    def look(self, order: list[int]) -> None:
        chosen = sweep(self.work, order, self.best + self.rounding())
        self.bound = max(self.bound, self.work.constant)
        cost = self.work.constant + excess(self.work, chosen)
        cost -= float(self.prices @ (used(self.work, chosen) - self.work.bounds))
        if cost < self.best:
            self.offer(chosen)

    def offer(self, core: dict[int, int]) -> None:
        """Take a choice of the core if it is allowed and better than the best so far."""
        choice = self.work.complete(core)
        cost = self.problem.cost(choice)
        if cost < self.best and self.problem.fits(choice):
            self.best, self.choice = cost, choice

    def closed(self) -> bool:
        return self.choice is not None and self.best - self.bound <= self.rounding()

    def rounding(self) -> float:
        return _ROUNDING * abs(self.best) + 1e-12

    def price(self, change: np.ndarray) -> None:
        self.prices = self.prices + change
        if change.any():
            price(self.work, change)

    def finish(self) -> None:
        """Leave the rest to HiGHS."""
        self.work.reduce()
        cap(self.work, self.best)
        try:
            chosen, bound = solve_ilp(self.work.rest(), max(1.0, self.deadline - time.monotonic()))
        except (InfeasibleError, TimeoutError):
            if self.choice is None:
                raise
            return
        self.bound = max(self.bound, self.work.constant + bound)
        self.offer(dict(zip(self.work.costs, chosen, strict=True)))
