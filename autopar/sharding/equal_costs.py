"""Transformations of a selection problem that preserve costs, before and after message passing."""

from collections.abc import Iterable

import numpy as np

from autopar.sharding.presolve import Reduction


def make_finite(work: Reduction) -> None:
    """Replace infinite costs by one that exceeds every allowed choice, and normalize."""
    normalize(work)
    arrays = [*work.costs.values(), *(cost for i, j, cost in _edges(work))]
    enough = 1.0 + sum(float(np.max(cost, where=np.isfinite(cost), initial=0.0)) for cost in arrays)
    for cost in arrays:
        cost[~np.isfinite(cost)] = enough


def normalize(work: Reduction) -> None:
    """Subtract the least cost of each decision and edge, and add it to the constant."""
    for cost in (*work.costs.values(), *(cost for i, j, cost in _edges(work))):
        least = cost.min()
        if np.isfinite(least):
            cost -= least
            work.constant += float(least)


def merge_equal_rows(work: Reduction, best: float) -> None:
    """Forbid pairs that are in no choice better than `best`; move costs from edges to decisions.

    Sweeps leave different costs in rows of an edge that were equal up to a constant. Equal rows
    make a smaller integer program.
    """
    if not np.isfinite(best):
        return
    unit = abs(best) or 1.0
    enough = best - work.constant + 1e-6 * unit
    for i, j, cost in list(_edges(work)):
        cost = np.where(cost > enough, np.inf, cost)
        for owner, axis in ((i, 0), (j, 1)):
            # The neighbour's option that is allowed with most options of the owner.
            reference = np.isfinite(cost).sum(axis=axis).argmax()
            offset = cost.take(reference, axis=1 - axis)
            offset = np.where(np.isfinite(offset), offset, 0.0)
            work.costs[owner] = work.costs[owner] + offset
            cost = cost - np.expand_dims(offset, 1 - axis)
        cost = np.round(cost / unit, 10) * unit
        work.edges[i][j], work.edges[j][i] = cost, cost.T


def price(work: Reduction, change: np.ndarray) -> None:
    """Raise the price of each capacity constraint.

    With nonnegative prices the constant stays a lower bound of the choices that satisfy the
    constraints (Lagrangian relaxation).

    Args:
        work: the problem; changed.
        change: seconds per unit of each constraint.
    """
    for i, uses in work.uses.items():
        work.costs[i] = work.costs[i] + change @ uses
    for i, others in work.pairs.items():
        for j, uses in others.items():
            if i < j:
                work.join(i, j, np.tensordot(change, uses, 1))
    work.constant -= float(change @ work.bounds)
    normalize(work)


def used(work: Reduction, choice: dict[int, int]) -> np.ndarray:
    """Return what `choice` uses of each capacity constraint."""
    total = np.zeros(len(work.bounds))
    for i, k in choice.items():
        total += work.uses[i][:, k]
        for j, uses in work.pairs.get(i, {}).items():
            if i < j:
                total += uses[:, k, choice[j]]
    return total


def _edges(work: Reduction) -> Iterable[tuple[int, int, np.ndarray]]:
    return [(i, j, cost) for i, others in work.edges.items() for j, cost in others.items() if i < j]
