"""The cheapest recomputation that fits into memory, as an integer program.

A binary variable r[v] says that value v is computed again. At a program point t, p[v] says that the
copy of v is still to be made: p[v] = r[v] if the backward pass has not read v by then, and no copy
that is computed from v has been made. A value that the backward pass still reads at t is live
unless p[v]; any other value is live if there is a copy to be made from it, and it is itself kept or
made. The constraints of a program point are added when a solution exceeds the budget there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from autopar.recompute.recompute_problem import RecomputeProblem

_GAP = 1e-4
"""Relative gap at which the search may stop."""

_POINTS = 4
"""Number of program points that are added after a solution: the fullest one of as many parts."""

type _Terms = Mapping[int, float]
"""A linear expression: the coefficient of each variable, and a constant under -1."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A solution of a recomputation problem.

    Attributes:
        repeated: The numbers of the values that are computed again.
        seconds: The time that it takes to compute them.
        peak_bytes: The most bytes that are live at a program point.
    """

    repeated: frozenset[int]
    seconds: float
    peak_bytes: float


def cheapest_recomputation(
    problem: RecomputeProblem, budget: float, time_limit: float = 5.0
) -> Recomputation | None:
    """Return the cheapest recomputation within `budget` bytes; None if there is none.

    Args:
        problem: The values.
        budget: The bytes that may be live at any program point.
        time_limit: Seconds for each integer program.
    """
    return _search(problem, budget, time_limit)


def least_memory(
    problem: RecomputeProblem, time_limit: float = 2.0, rounds: int = 1000
) -> Recomputation:
    """Return the recomputation with the lowest peak memory that is found.

    Args:
        problem: The values.
        time_limit: Seconds for each integer program.
        rounds: Maximum number of integer programs.
    """
    found = _search(problem, None, time_limit, rounds)
    assert found is not None
    return found


def _search(
    problem: RecomputeProblem, budget: float | None, time_limit: float, rounds: int = 1000
) -> Recomputation | None:
    """Return the cheapest solution within a budget, or the one of least memory without."""
    program = _Program(problem, budget)
    best: Recomputation | None = None
    repeated: frozenset[int] | None = frozenset()
    bound = 0.0
    while repeated is not None:
        used = problem.copied_at(repeated)
        repeated = frozenset(used)
        live = problem.live_bytes(repeated)
        peak = float(live.max(initial=0.0))
        if budget is None and (best is None or peak < best.peak_bytes):
            best = Recomputation(repeated, problem.seconds(repeated), peak)
        limit = budget if budget is not None else bound
        if peak <= limit * (1 + 1e-9):
            return best or Recomputation(repeated, problem.seconds(repeated), peak)
        rounds -= 1
        if rounds < 0 or not program.add_fullest(live, limit):
            return best
        repeated, bound = program.solve(time_limit)
    return best


class _Program:
    """The integer program, with the constraints of some program points.

    Variables are numbered: first r of all values, then the peak if it is minimized, then those of
    program points.
    """

    def __init__(self, problem: RecomputeProblem, budget: float | None) -> None:
        self.problem, self.budget = problem, budget
        self.scale = max(float(problem.base.max(initial=0.0)), 1.0)
        self.scale = max(self.scale, max((v.num_bytes for v in problem.values), default=1.0))
        self.points: set[int] = set()
        self.num_variables = len(problem.values) + 1
        self.rows: list[_Terms] = []  # each is at most zero

    def add_fullest(self, live: np.ndarray, limit: float) -> bool:
        """Add the fullest program points beyond a limit; return whether there was a new one."""
        parts = np.array_split(np.arange(len(live)), _POINTS)
        fullest = {int(part[live[part].argmax()]) for part in parts if part.size}
        fullest.add(int(live.argmax()))
        new = {point for point in fullest if live[point] > limit} - self.points
        for point in sorted(new):
            self._add_point(point)
        return bool(new)

    def solve(self, time_limit: float) -> tuple[frozenset[int] | None, float]:
        """Return the values that are computed again, and the peak bytes of the program.

        None if no choice satisfies the constraints.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        values = self.problem.values
        count = len(values)
        cost = np.zeros(self.num_variables)
        seconds = np.array([value.seconds for value in values])
        unit = max(float(seconds.max(initial=0.0)), 1e-12)
        if self.budget is None:
            cost[count] = 1.0
        else:
            cost[:count] = seconds / unit
        cost[:count] += 1e-7  # of equal choices, the one with fewer copies
        integrality = np.zeros(self.num_variables)
        integrality[:count] = 1
        upper = np.ones(self.num_variables)
        upper[:count] = self.problem.open
        upper[count] = inf if self.budget is None else self.budget / self.scale
        matrix, constants = self._matrix()
        result = milp(
            cost,
            integrality=integrality,
            bounds=Bounds(np.zeros(self.num_variables), upper),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, -inf, -constants),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": _GAP, "time_limit": time_limit},
        )
        if result.x is None:
            return None, inf
        peak = float(result.x[count]) * self.scale
        return frozenset(np.flatnonzero(result.x[:count] > 0.5).tolist()), peak

    def _matrix(self) -> tuple[Any, np.ndarray]:
        """Return the coefficients of all rows, shape (rows, variables), and their constants."""
        from scipy.sparse import csr_array

        entries = [
            (row, variable, factor)
            for row, terms in enumerate(self.rows)
            for variable, factor in terms.items()
            if variable >= 0
        ]
        rows, columns, factors = map(np.array, zip(*entries, strict=True))
        shape = (len(self.rows), self.num_variables)
        constants = np.array([terms.get(-1, 0.0) for terms in self.rows])
        return csr_array((factors, (rows, columns)), shape=shape), constants

    def _variable(self) -> int:
        self.num_variables += 1
        return self.num_variables - 1

    def _add_point(self, point: int) -> None:
        """Add the constraint that memory at a program point fits."""
        self.points.add(point)
        problem = self.problem
        pending: dict[int, _Terms] = {}
        used: dict[int, float] = {-1: float(problem.base[point]), len(problem.values): -self.scale}
        for number in reversed(range(len(problem.values))):
            value = problem.values[number]
            pending[number] = self._pending(number, point, pending)
            if value.made <= point <= value.until:
                used[-1] += value.num_bytes
            elif value.until < point:
                _add(used, self._live(number, point, pending), value.num_bytes)
        self.rows.append({variable: factor / self.scale for variable, factor in used.items()})

    def _pending(self, number: int, point: int, pending: Mapping[int, _Terms]) -> _Terms:
        """Return whether the copy of a value is still to be made after a program point."""
        problem = self.problem
        if not problem.open[number] or problem.values[number].late[0] <= point:
            return {}
        readers = [reader for reader in problem.readers[number] if problem.open[reader]]
        if problem.earliest[number] > point or not readers:
            return {number: 1.0}
        variable = self._variable()
        self.rows.append({variable: 1.0, number: -1.0})
        made: dict[int, float] = {number: 1.0, variable: -1.0}
        for reader in readers:
            copied = _sum({reader: 1.0}, pending[reader], -1.0)
            self.rows.append(_sum({variable: 1.0, -1: -1.0}, copied))
            _add(made, copied, -1.0)
        self.rows.append(made)
        return {variable: 1.0}

    def _live(self, number: int, point: int, pending: Mapping[int, _Terms]) -> _Terms:
        """Return whether a value or its copy is live after its last reader in the forward pass."""
        problem = self.problem
        if problem.values[number].late[1] >= point:
            return _sum({-1: 1.0}, pending[number], -1.0)
        waiting = [pending[reader] for reader in problem.readers[number] if pending[reader]]
        if not waiting:
            return {}
        variable = self._variable()
        for terms in waiting:
            self.rows.append(_sum(_sum(terms, pending[number], -1.0), {variable: -1.0}))
        return {variable: 1.0}


def _add(total: dict[int, float], terms: _Terms, factor: float = 1.0) -> None:
    for variable, coefficient in terms.items():
        total[variable] = total.get(variable, 0.0) + factor * coefficient


def _sum(a: _Terms, b: _Terms, factor: float = 1.0) -> _Terms:
    total = dict(a)
    _add(total, b, factor)
    return total
