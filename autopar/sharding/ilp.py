"""The integer program of a choice problem, for HiGHS."""

import numpy as np

from autopar.sharding.selection_problem import InfeasibleError, SelectionProblem


def solve_ilp(
    problem: SelectionProblem, time_limit: float, gap: float = 1e-6
) -> tuple[list[int], float]:
    """The cheapest choice (or one at most the share `gap` dearer), and a lower bound on what any costs.

    The integer program of Alpa (OSDI'22, equation 1): s_i over options, e_ij over pairs of options, whose margins equal s_i
    and s_j, and a row per limit. Options with equal rows in an edge are one *kind* there: e_ij runs over pairs of kinds, which
    are far fewer.

    Raises:
        InfeasibleError: every choice holds a forbidden option or pair.
        TimeoutError: HiGHS found no choice within `time_limit` seconds.
    """
    from scipy.optimize import (
        Bounds,
        LinearConstraint,
        milp,
    )  # most of a second to import, and workers solve nothing
    from scipy.sparse import coo_array

    at: list[int] = []
    objective: list[np.ndarray] = []
    integral: list[np.ndarray] = []
    size = 0

    def add(costs: np.ndarray, binary: bool) -> int:
        nonlocal size
        objective.append(costs)
        integral.append(np.full(len(costs), int(binary)))
        size += len(costs)
        return size - len(costs)

    for cost in problem.nodes:
        at.append(add(cost, True))
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    right: list[np.ndarray] = []
    height = 0

    def constrain(row: np.ndarray, column: np.ndarray, value: np.ndarray) -> None:
        rows.append(row)
        columns.append(column)
        values.append(value)

    for i, cost in enumerate(problem.nodes):
        count = len(cost)
        constrain(np.full(count, height), at[i] + np.arange(count), np.ones(count))
        right.append(np.ones(1))
        height += 1
    of_pairs: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in problem.limits]
    for (i, j), matrix in problem.edges.items():
        used = [limit.pairs.get((i, j)) for limit in problem.limits]
        kinds_i, kinds_j, cost, *used = _distinct(
            matrix, *(np.zeros_like(matrix) if u is None else u for u in used)
        )
        n, m = cost.shape
        pairs = add(cost.ravel(), False) + np.arange(n * m)
        for limit, use in enumerate(used):
            if use.any():
                of_pairs[limit].append((pairs, use.ravel()))
        for kind, kinds, owner in (
            (np.arange(n * m) // m, kinds_i, i),
            (np.arange(n * m) % m, kinds_j, j),
        ):
            constrain(height + kind, pairs, np.ones(n * m))
            constrain(height + kinds, at[owner] + np.arange(len(kinds)), -np.ones(len(kinds)))
            right.append(np.zeros(kinds.max() + 1))
            height += kinds.max() + 1
    equations = height
    for number, limit in enumerate(problem.limits):
        scale = max(abs(limit.bound), 1.0)
        of_nodes = [(at[i] + np.arange(len(use)), use) for i, use in limit.uses.items()]
        for columns_used, use in of_nodes + of_pairs[number]:
            constrain(np.full(len(use), height), columns_used, use / scale)
        right.append(np.array([limit.bound / scale]))
        height += 1
    cost = np.concatenate(objective)
    upper = np.where(np.isfinite(cost), 1.0, 0.0)  # a forbidden option is one that can't be taken
    rows_by_columns = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(height, size),
    )
    upper_bound = np.concatenate(right)
    lower_bound = np.where(np.arange(height) < equations, upper_bound, -np.inf)
    scale = max(float(np.max(cost, where=np.isfinite(cost), initial=0.0)), 1e-30)
    result = milp(
        np.where(np.isfinite(cost), cost, 0.0) / scale,
        integrality=np.concatenate(integral),
        bounds=Bounds(0, upper),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(rows_by_columns.tocsr(), lower_bound, upper_bound),  # pyright: ignore[reportArgumentType]
        options={"time_limit": time_limit, "mip_rel_gap": gap},
    )
    if result.x is None:
        if result.status == 1:
            raise TimeoutError(
                f"HiGHS found no sharding plan within {time_limit} s; raise the time limit"
            )
        raise InfeasibleError("no choice of shardings satisfies every requirement")
    chosen = [
        int(np.argmax(result.x[start : start + len(cost)]))
        for start, cost in zip(at, problem.nodes, strict=True)
    ]
    return chosen, scale * float(result.mip_dual_bound or 0.0)


def _distinct(*matrices: np.ndarray) -> tuple[np.ndarray, ...]:
    """The kind of each row, the kind of each column, and each matrix as one over pairs of kinds."""
    _, rows, kind_of_row = np.unique(
        np.hstack(matrices), axis=0, return_index=True, return_inverse=True
    )
    _, columns, kind_of_column = np.unique(
        np.vstack(matrices), axis=1, return_index=True, return_inverse=True
    )
    return kind_of_row, kind_of_column, *(matrix[np.ix_(rows, columns)] for matrix in matrices)
