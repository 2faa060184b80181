"""One-hot choice problems: pick one option per decision so that node and edge costs add up to the least.

This is the integer program of Alpa (OSDI'22, equation 1) without its memory rows. Exact reductions come first: options that
another one beats whatever the neighbours do (dead-end elimination, Goldstein 1994), and decisions with at most two
neighbours, which fold into them. HiGHS solves what is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

FORBIDDEN = np.inf
"""Cost of an option, or a pair of options, that must not be chosen."""


class InfeasibleError(ValueError):
    """No choice avoids every forbidden option."""


@dataclass(frozen=True)
class ChoiceProblem:
    """Costs of options and of pairs of options, in seconds.

    Attributes:
        nodes: for each decision, the cost of each option.
        edges: for pairs (i, j) of decisions with i < j, the cost of each pair of options, (options of i, options of j).
    """

    nodes: Sequence[np.ndarray]
    edges: Mapping[tuple[int, int], np.ndarray]

    def __post_init__(self) -> None:
        for (i, j), cost in self.edges.items():
            if not i < j or cost.shape != (len(self.nodes[i]), len(self.nodes[j])):
                sizes = (len(self.nodes[i]), len(self.nodes[j]))
                raise ValueError(f"edge {(i, j)} needs i < j and costs of shape {sizes}, got {cost.shape}")

    def cost(self, choice: Sequence[int]) -> float:
        """What `choice`, an option per decision, costs."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.nodes, choice, strict=True))
        return nodes + sum(float(cost[choice[i], choice[j]]) for (i, j), cost in self.edges.items())


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice, what it costs, and how far from the optimum it may be.

    Attributes:
        choice: the chosen option of each decision.
        objective: its cost in seconds.
        gap: proven relative distance to the optimum (0 when optimal).
        core: decisions that were left for HiGHS.
    """

    choice: tuple[int, ...]
    objective: float
    gap: float
    core: int


def solve(problem: ChoiceProblem, time_limit: float = 60.0) -> Solution:
    """The cheapest choice.

    Raises:
        InfeasibleError: every choice holds a forbidden option or pair.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    work = _Reduction(problem)
    work.reduce()
    core = sorted(work.costs)
    gap = 0.0
    if core:
        chosen, gap = _solve_core(work, core, time_limit)
        work.choice.update(chosen)
    for unfold in reversed(work.folded):
        unfold(work.choice)
    choice = tuple(work.choice[i] for i in range(len(problem.nodes)))
    objective = problem.cost(choice)
    if not np.isfinite(objective):
        raise InfeasibleError("no choice of shardings satisfies every requirement")
    return Solution(choice, objective, gap, len(core))


@dataclass
class _Reduction:
    """The problem as it shrinks: live decisions with their live options, and how to undo each fold."""

    problem: ChoiceProblem
    costs: dict[int, np.ndarray] = field(init=False)
    options: dict[int, np.ndarray] = field(init=False)
    edges: dict[int, dict[int, np.ndarray]] = field(init=False)
    choice: dict[int, int] = field(init=False, default_factory=dict)
    folded: list = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.costs = {i: np.array(cost, float) for i, cost in enumerate(self.problem.nodes)}
        self.options = {i: np.arange(len(cost)) for i, cost in self.costs.items()}
        self.edges = {i: {} for i in self.costs}
        for (i, j), cost in self.problem.edges.items():
            self._join(i, j, np.array(cost, float))

    def reduce(self) -> None:
        pending = set(self.costs)
        while pending:
            i = min(pending, key=lambda k: (len(self.edges[k]), len(self.costs[k])))
            pending.remove(i)
            dropped = self._drop_dead_ends(i)
            neighbours = list(self.edges[i])
            if len(self.costs[i]) == 1:
                self._settle(i)
                pending.update(neighbours)
            elif len(neighbours) <= 2:
                self._fold(i)
                pending.update(neighbours)
            elif dropped:
                pending.update(neighbours)

    def _join(self, i: int, j: int, cost: np.ndarray) -> None:
        """Add an edge, on top of one that may be there."""
        if j in self.edges[i]:
            cost = cost + self.edges[i][j]
        self.edges[i][j], self.edges[j][i] = cost, cost.T

    def _drop_dead_ends(self, i: int) -> bool:
        """Drop the options of `i` that another option beats for every choice of the neighbours."""
        alive = np.isfinite(self.costs[i])
        for cost in self.edges[i].values():
            alive &= np.isfinite(cost).any(axis=1)
        if not alive.any():
            raise InfeasibleError("no choice of shardings satisfies every requirement")
        before = len(alive)
        if before > 1:
            margin = np.subtract.outer(_finite(self.costs[i]), _finite(self.costs[i]))
            for cost in self.edges[i].values():
                cost = _finite(cost)
                margin += (cost[:, None, :] - cost[None, :, :]).min(axis=2)
            # margin[a, b] >= 0: b is never worse than a. Ties are broken towards the lower index.
            beaten = (margin > 0) | ((margin == 0) & np.tri(before, k=-1, dtype=bool))
            beaten[:, ~alive] = False
            for a in range(before - 1, -1, -1):
                if alive[a] and (beaten[a] & alive).any():
                    alive[a] = False
        if alive.all():
            return False
        self.costs[i], self.options[i] = self.costs[i][alive], self.options[i][alive]
        for j in list(self.edges[i]):
            kept = self.edges[i][j][alive]
            self.edges[i][j], self.edges[j][i] = kept, kept.T
        return True

    def _settle(self, i: int) -> None:
        """Take the only option of a decision: its edges become costs of its neighbours."""
        for j, cost in self.edges.pop(i).items():
            self.costs[j] = self.costs[j] + cost[0]
            del self.edges[j][i]
        self.choice[i] = int(self.options.pop(i)[0])
        del self.costs[i]

    def _fold(self, i: int) -> None:
        """Eliminate a decision with at most two neighbours: they take over its best answer to each of their options."""
        neighbours = list(self.edges[i].items())
        total = self.costs.pop(i).reshape(-1, *(1,) * len(neighbours))
        for axis, (_, cost) in enumerate(neighbours):
            shape = [len(cost), *(1,) * len(neighbours)]
            shape[axis + 1] = cost.shape[1]
            total = total + cost.reshape(shape)
        best = total.argmin(axis=0)
        least = total.min(axis=0)
        names = [j for j, _ in neighbours]
        options, theirs = self.options.pop(i), {j: self.options[j] for j in names}
        del self.edges[i]
        for j in names:
            del self.edges[j][i]
        if len(names) == 1:
            self.costs[names[0]] = self.costs[names[0]] + least
        elif len(names) == 2:
            self._join(names[0], names[1], least)
        elif not np.isfinite(least):
            raise InfeasibleError("no choice of shardings satisfies every requirement")

        def unfold(choice: dict[int, int]) -> None:
            position = tuple(int(np.searchsorted(theirs[j], choice[j])) for j in names)
            choice[i] = int(options[best[position]])

        self.folded.append(unfold)


def _distinct(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kind of each row, the kind of each column, and the cost of each pair of kinds."""
    rows, kind_of_row = np.unique(cost, axis=0, return_inverse=True)
    columns, kind_of_column = np.unique(rows, axis=1, return_inverse=True)
    return kind_of_row, kind_of_column, columns


def _finite(cost: np.ndarray) -> np.ndarray:
    """Forbidden entries as a cost that no sum of real ones reaches, so that differences stay numbers."""
    return np.where(np.isfinite(cost), cost, 1e12)


def _solve_core(work: _Reduction, core: list[int], time_limit: float) -> tuple[dict[int, int], float]:
    """The one-hot integer program of what is left: s_i over options, e_ij over pairs, whose margins equal s_i and s_j.

    Options with equal rows in an edge are one *kind* there: e_ij runs over pairs of kinds, which are far fewer.
    """
    at: dict[int, int] = {}
    objective: list[np.ndarray] = []
    integral: list[np.ndarray] = []
    size = 0

    def add(costs: np.ndarray, binary: bool) -> int:
        nonlocal size
        objective.append(costs)
        integral.append(np.full(len(costs), int(binary)))
        size += len(costs)
        return size - len(costs)

    for i in core:
        at[i] = add(work.costs[i], True)
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    right: list[np.ndarray] = []
    height = 0

    def constrain(row: np.ndarray, column: np.ndarray, value: np.ndarray) -> None:
        rows.append(row)
        columns.append(column)
        values.append(value)

    for i in core:
        count = len(work.costs[i])
        constrain(np.full(count, height), at[i] + np.arange(count), np.ones(count))
        right.append(np.ones(1))
        height += 1
    for i in core:
        for j, cost in work.edges[i].items():
            if i > j:
                continue
            kinds_i, kinds_j, cost = _distinct(cost)
            n, m = cost.shape
            pairs = add(cost.ravel(), False) + np.arange(n * m)
            for kind, kinds, owner in ((np.arange(n * m) // m, kinds_i, i), (np.arange(n * m) % m, kinds_j, j)):
                constrain(height + kind, pairs, np.ones(n * m))
                constrain(height + kinds, at[owner] + np.arange(len(kinds)), -np.ones(len(kinds)))
                right.append(np.zeros(kinds.max() + 1))
                height += kinds.max() + 1
    cost = np.concatenate(objective)
    upper = np.where(np.isfinite(cost), 1.0, 0.0)  # a forbidden option is one that can't be taken
    matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(height, size))
    bound = np.concatenate(right)
    scale = max(float(np.max(cost, where=np.isfinite(cost), initial=0.0)), 1e-30)
    result = milp(
        np.where(np.isfinite(cost), cost, 0.0) / scale,
        integrality=np.concatenate(integral),
        bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix.tocsr(), bound, bound),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        if result.status == 1:
            raise TimeoutError(f"HiGHS found no sharding plan within {time_limit} s; raise the time limit")
        raise InfeasibleError("no choice of shardings satisfies every requirement")
    chosen = {}
    for i in core:
        within = result.x[at[i] : at[i] + len(work.costs[i])]
        chosen[i] = int(work.options[i][int(np.argmax(within))])
    return chosen, float(result.mip_gap or 0.0)
