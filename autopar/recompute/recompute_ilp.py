"""The cheapest recomputation and offload that fit into memory, as an integer program.

Binary variables r[v] and o[v] say that value v is computed again or offloaded; at most one is 1. At
a program point t, p[v] says that v is still to be computed again: p[v] = r[v] if the backward pass
has not read v by then, and no copy that is computed from v has been made. Likewise q[v] says that v
is still to be fetched from host memory. A value that the backward pass still reads at t is live
unless p[v] or q[v]; any other value is live if there is a copy to be made from it, and it is itself
kept, made or fetched. The constraints of a program point are added when a solution exceeds the
budget there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from autopar.recompute.recompute_problem import Choice, RecomputeProblem
from autopar.sharding.highs import minimize

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
        choice: the values that are computed again, and those that are offloaded.
        seconds: the time that these take.
        peak_bytes: the most bytes that are live at a program point.
    """

    choice: Choice
    seconds: float
    peak_bytes: float


def cheapest_recomputation(problem: RecomputeProblem, budget: float) -> Recomputation | None:
    """Return the cheapest recomputation within `budget` bytes; None if there is none.

    Args:
        problem: the values.
        budget: the bytes that may be live at any program point.
    """
    return _search(problem, budget, time_limit=5.0)


def least_memory(problem: RecomputeProblem, rounds: int = 1000) -> Recomputation:
    """Return the recomputation with the lowest peak memory that is found.

    Args:
        problem: the values.
        rounds: maximum number of integer programs.
    """
    found = _search(problem, None, 2.0, rounds)
    assert found is not None
    return found


def _search(
    problem: RecomputeProblem, budget: float | None, time_limit: float, rounds: int = 1000
) -> Recomputation | None:
    """Return the cheapest solution within a budget, or the one of least memory without."""
    program = _Program(problem, budget)
    best: Recomputation | None = None
    choice: Choice | None = Choice()
    bound = 0.0
    while choice is not None:
        choice = problem.read(choice)
        live = problem.live_bytes(choice)
        peak = float(live.max(initial=0.0))
        if budget is None and (best is None or peak < best.peak_bytes):
            best = Recomputation(choice, problem.seconds(choice), peak)
        limit = budget if budget is not None else bound
        if peak <= limit * (1 + 1e-9):
            return best or Recomputation(choice, problem.seconds(choice), peak)
        rounds -= 1
        if rounds < 0 or not program.add_fullest(live, limit):
            return best
        choice, bound = program.solve(time_limit)
    return best


class _Program:
    """The integer program, with the constraints of some program points.

    Variables are numbered: first r of all values, then o of all values, then the peak if it is
    minimized, then those of program points.
    """

    def __init__(self, problem: RecomputeProblem, budget: float | None) -> None:
        self.problem, self.budget = problem, budget
        self.count = len(problem.values)
        self.peak = 2 * self.count
        self.scale = max(float(problem.base.max(initial=0.0)), 1.0)
        self.scale = max(self.scale, max((v.num_bytes for v in problem.values), default=1.0))
        self.points: set[int] = set()
        self.num_variables = self.peak + 1
        self.rows: list[_Terms] = [  # each is at most zero
            {number: 1.0, self.count + number: 1.0, -1: -1.0}
            for number in range(self.count)
            if problem.repeatable[number] and problem.offloadable[number]
        ]

    def add_fullest(self, live: np.ndarray, limit: float) -> bool:
        """Add the fullest program points beyond a limit; return whether there was a new one."""
        parts = np.array_split(np.arange(len(live)), _POINTS)
        fullest = {int(part[live[part].argmax()]) for part in parts if part.size}
        fullest.add(int(live.argmax()))
        new = {point for point in fullest if live[point] > limit} - self.points
        for point in sorted(new):
            self._add_point(point)
        return bool(new)

    def solve(self, time_limit: float) -> tuple[Choice | None, float]:
        """Return what happens to the values, and the peak bytes of the program.

        None if no choice satisfies the constraints.
        """
        values = self.problem.values
        count, peak = self.count, self.peak
        cost = np.zeros(self.num_variables)
        is_open = np.array([*self.problem.repeatable, *self.problem.offloadable], bool)
        seconds = np.array([v.seconds for v in values] + [v.host_seconds for v in values])
        seconds[~is_open] = 0.0
        unit = max(float(seconds.max(initial=0.0)), 1e-12)
        if self.budget is None:
            cost[peak] = 1.0
        else:
            cost[:peak] = seconds / unit
        cost[:peak] += 1e-7  # of equal choices, the one with fewer copies
        integrality = np.zeros(self.num_variables)
        integrality[:peak] = 1
        upper = np.ones(self.num_variables)
        upper[:peak] = is_open
        upper[peak] = inf if self.budget is None else self.budget / self.scale
        matrix, constants = self._matrix()
        result = minimize(cost, integrality, upper, matrix, (-inf, -constants), time_limit, _GAP)
        if result.x is None:
            return None, inf
        repeated, offloaded = (
            frozenset(np.flatnonzero(part > 0.5).tolist())
            for part in (result.x[:count], result.x[count:peak])
        )
        return Choice(repeated, offloaded), float(result.x[peak]) * self.scale

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
        pending: dict[int, _Pending] = {}
        used: dict[int, float] = {-1: float(problem.base[point]), self.peak: -self.scale}
        for number in reversed(range(self.count)):
            value = problem.values[number]
            pending[number] = self._pending(number, point, pending)
            if value.made <= point <= value.until:
                used[-1] += value.num_bytes
            elif value.until < point:
                _add(used, self._live(number, point, pending), value.num_bytes)
                if point <= value.sent and problem.offloadable[number]:
                    _add(used, {self.count + number: value.num_bytes})
        self.rows.append({variable: factor / self.scale for variable, factor in used.items()})

    def _pending(self, number: int, point: int, pending: Mapping[int, "_Pending"]) -> "_Pending":
        """Return whether a value is still to be computed again, or fetched, after a point."""
        problem = self.problem
        choices = [
            {variable: 1.0} if is_open else {}
            for variable, is_open in (
                (number, problem.repeatable[number]),
                (self.count + number, problem.offloadable[number]),
            )
        ]
        if not any(choices) or problem.values[number].late[0] <= point:
            return _Pending({}, {})
        readers = [reader for reader in problem.readers[number] if problem.repeatable[reader]]
        if problem.earliest[number] > point or not readers:
            return _Pending(*choices)
        parts: list[_Terms] = []
        for chosen in choices:
            part = {self._variable(): 1.0} if chosen else {}
            if chosen:
                self.rows.append(_sum(part, chosen, -1.0))
            parts.append(part)
        found = _Pending(*parts)
        made = dict(_sum(_sum(choices[0], choices[1]), found.any, -1.0))
        for reader in readers:
            copied = _sum({reader: 1.0}, pending[reader].copy, -1.0)
            self.rows.append(_sum(_sum(found.any, {-1: -1.0}), copied))
            _add(made, copied, -1.0)
        self.rows.append(made)
        return found

    def _live(self, number: int, point: int, pending: Mapping[int, "_Pending"]) -> _Terms:
        """Return whether a value or its copy is live after its last reader in the forward pass."""
        problem = self.problem
        if problem.values[number].late[1] >= point:
            return _sum({-1: 1.0}, pending[number].any, -1.0)
        readers = problem.readers[number]
        waiting = [pending[reader].copy for reader in readers if pending[reader].copy]
        if not waiting:
            return {}
        variable = self._variable()
        for terms in waiting:
            self.rows.append(_sum(_sum(terms, pending[number].any, -1.0), {variable: -1.0}))
        return {variable: 1.0}


@dataclass(frozen=True, slots=True)
class _Pending:
    """Whether a value is still to be copied after a program point.

    Attributes:
        copy: whether it is still to be computed again.
        fetch: whether it is still to be fetched from host memory.
    """

    copy: _Terms
    fetch: _Terms

    @property
    def any(self) -> _Terms:
        """Whether it is still to be computed again or fetched."""
        return _sum(self.copy, self.fetch)


def _add(total: dict[int, float], terms: _Terms, factor: float = 1.0) -> None:
    for variable, coefficient in terms.items():
        total[variable] = total.get(variable, 0.0) + factor * coefficient


def _sum(a: _Terms, b: _Terms, factor: float = 1.0) -> _Terms:
    total = dict(a)
    _add(total, b, factor)
    return total
