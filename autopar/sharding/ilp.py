"""The integer program of a selection problem, solved by HiGHS."""

import numpy as np

from autopar.sharding.highs import minimize
from autopar.sharding.selection_problem import (
    CapacityConstraint,
    InfeasibleError,
    SelectionProblem,
)


def solve_ilp(
    problem: SelectionProblem, time_limit: float, gap: float = 1e-6
) -> tuple[list[int], float]:
    """Return the cheapest choice and a lower bound of the cost of every choice.

    The integer program is that of Alpa (OSDI'22, equation 1): a binary variable s_i per option of
    decision i, a continuous variable e_ij per pair of options of an edge, whose margins equal s_i
    and s_j, and a row per capacity constraint. Options with equal rows in an edge are one class:
    e_ij has a variable per pair of classes, which are far fewer than pairs of options.

    Args:
        problem: costs in seconds, with constraints.
        time_limit: seconds for HiGHS.
        gap: relative gap at which HiGHS may stop.

    Raises:
        InfeasibleError: no choice satisfies all constraints with a finite cost.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    program = _IntegerProgram(problem)
    cost = np.concatenate(program.costs)
    is_allowed = np.isfinite(cost)
    scale = max(float(np.max(cost, where=is_allowed, initial=0.0)), 1e-30)
    rows, lower, upper = program.constraints()
    result = minimize(
        np.where(is_allowed, cost, 0.0) / scale,
        np.concatenate(program.is_binary),
        np.where(is_allowed, 1.0, 0.0),
        rows,
        (lower, upper),
        time_limit,
        gap,
    )
    if result.x is None:
        if result.status == 1:
            raise TimeoutError(
                f"HiGHS found no sharding plan within {time_limit} s; raise the time limit"
            )
        raise InfeasibleError("no choice of shardings satisfies every requirement")
    return program.choice(result.x), scale * float(result.mip_dual_bound or 0.0)


class _IntegerProgram:
    """Variables and rows of the integer program.

    Attributes:
        costs: cost of the variables, in the order in which they were added.
        is_binary: 1 for the options of decisions, 0 for pairs of options.
        first: the first variable of each decision.
    """

    def __init__(self, problem: SelectionProblem) -> None:
        self.problem = problem
        self.costs: list[np.ndarray] = []
        self.is_binary: list[np.ndarray] = []
        self._size = 0
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._bounds: list[np.ndarray] = []
        self._height = 0
        self.first = [self._add_variables(cost, binary=True) for cost in problem.nodes]
        for number, cost in enumerate(problem.nodes):
            self._select_one(number, len(cost))
        # For each capacity constraint, the variables of pairs that use it, and how much they use.
        self._pair_uses: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in problem.limits]
        for (i, j), matrix in problem.edges.items():
            self._add_edge(i, j, matrix)
        self._equations = self._height
        for constraint, pairs in zip(problem.limits, self._pair_uses, strict=True):
            self._add_capacity(constraint, pairs)

    def constraints(self):
        """Return the matrix of all rows, and the lower and upper bounds of each row."""
        from scipy.sparse import coo_array

        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(self._height, self._size))
        upper = np.concatenate(self._bounds)
        lower = np.where(np.arange(self._height) < self._equations, upper, -np.inf)
        return matrix.tocsr(), lower, upper

    def choice(self, solution: np.ndarray) -> list[int]:
        """Return the option of each decision in a solution."""
        options = zip(self.first, self.problem.nodes, strict=True)
        return [int(np.argmax(solution[first : first + len(cost)])) for first, cost in options]

    def _add_variables(self, costs: np.ndarray, binary: bool) -> int:
        """Add a variable per cost; return the first."""
        self.costs.append(costs)
        self.is_binary.append(np.full(len(costs), int(binary)))
        self._size += len(costs)
        return self._size - len(costs)

    def _enter(self, row: np.ndarray, column: np.ndarray, value: np.ndarray) -> None:
        self._entries.append((row, column, value))

    def _bound(self, values: np.ndarray) -> None:
        """Close as many rows as there are `values`, which bound them."""
        self._bounds.append(values)
        self._height += len(values)

    def _select_one(self, decision: int, options: int) -> None:
        """Require that exactly one option of a decision is selected."""
        variables = self.first[decision] + np.arange(options)
        self._enter(np.full(options, self._height), variables, np.ones(options))
        self._bound(np.ones(1))

    def _add_edge(self, i: int, j: int, matrix: np.ndarray) -> None:
        """Add the variables of an edge; their margins are the variables of its decisions."""
        uses = [constraint.pairs.get((i, j)) for constraint in self.problem.limits]
        matrices = [np.zeros_like(matrix) if use is None else use for use in uses]
        classes_i, classes_j, cost, *distinct_uses = _distinct(matrix, *matrices)
        n, m = cost.shape
        pairs = self._add_variables(cost.ravel(), binary=False) + np.arange(n * m)
        for pair_uses, use in zip(self._pair_uses, distinct_uses, strict=True):
            if use.any():
                pair_uses.append((pairs, use.ravel()))
        margins = (
            (np.arange(n * m) // m, classes_i, self.first[i]),
            (np.arange(n * m) % m, classes_j, self.first[j]),
        )
        for class_of_pair, class_of_option, first in margins:
            options = np.arange(len(class_of_option))
            self._enter(self._height + class_of_pair, pairs, np.ones(n * m))
            self._enter(self._height + class_of_option, first + options, -np.ones(len(options)))
            self._bound(np.zeros(class_of_option.max() + 1))

    def _add_capacity(
        self, constraint: CapacityConstraint, pairs: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Bound what the selected options and pairs use, in units of the bound."""
        scale = max(abs(constraint.bound), 1.0)
        options = [(self.first[i] + np.arange(len(use)), use) for i, use in constraint.uses.items()]
        for variables, use in options + pairs:
            self._enter(np.full(len(use), self._height), variables, use / scale)
        self._bound(np.array([constraint.bound / scale]))


def _distinct(*matrices: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the classes of the rows and of the columns, and the matrices over pairs of classes.

    Rows that are equal in all matrices form a class; so do columns.
    """
    _, rows, class_of_row = np.unique(
        np.hstack(matrices), axis=0, return_index=True, return_inverse=True
    )
    _, columns, class_of_column = np.unique(
        np.vstack(matrices), axis=1, return_index=True, return_inverse=True
    )
    return class_of_row, class_of_column, *(matrix[np.ix_(rows, columns)] for matrix in matrices)
