"""Lower bounds of a selection problem by TRW-S, and the options that they rule out.

Sequential tree-reweighted message passing (Kolmogorov, PAMI 2006) moves costs between decisions and
their edges. The cost of every choice stays the same, no cost is negative, and the constant part
grows. The constant is a lower bound of all choices; an option whose cost exceeds the difference of
a known choice and that bound is dropped. The method solves the dual of the linear relaxation.
Layers that repeat form a chain, along which few sweeps propagate the bound.
"""

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


def sweep(work: Reduction, order: Iterable[int], best: float) -> dict[int, int]:
    """Visit decisions in `order`, and pass their costs on to the edges of later ones.

    Options that can't be part of a choice better than `best` are dropped.

    Returns:
        A choice in which each decision takes its best option given the decisions before it.
    """
    choice: dict[int, int] = {}
    for i in order:
        cost, edges = work.costs[i], work.edges[i]
        gathered = {j: np.minimum.reduce(pairs, axis=1) for j, pairs in edges.items()}
        for least in gathered.values():
            cost += least
        least = np.minimum.reduce(cost)
        cost -= least
        work.constant += float(least)
        alive = cost <= best - work.constant
        if not alive.all() and alive.any():
            work.keep(i, alive)
            cost, edges = work.costs[i], work.edges[i]
            gathered = {j: least[alive] for j, least in gathered.items()}
        later = sum(j not in choice for j in edges)
        share = cost / max(later, len(edges) - later, 1)
        answer = cost.copy()
        for j, pairs in edges.items():
            if j in choice:
                pairs -= gathered[j][:, None]
                answer += pairs[:, choice[j]]
            else:
                pairs += (share - gathered[j])[:, None]
        cost -= share * later
        choice[i] = int(answer.argmin())
    return choice


def local_optimum(work: Reduction, choice: dict[int, int]) -> dict[int, int]:
    """Return a local optimum: decisions take their best option given all others until none changes.

    These are iterated conditional modes (Besag, J. R. Stat. Soc. B 1986).
    """
    choice = dict(choice)
    rounding = 1e-12 * abs(work.constant)  # moving costs may leave slightly negative ones
    waiting = dict.fromkeys(choice)
    while waiting:
        i, _ = waiting.popitem()
        answer = work.costs[i].copy()
        for j, pairs in work.edges[i].items():
            answer += pairs[:, choice[j]]
        k = int(answer.argmin())
        now = answer[choice[i]]
        # Differences of rounding alone could alternate forever.
        if answer[k] < now - max(1e-9 * abs(now), rounding):
            choice[i] = k
            waiting.update(dict.fromkeys(work.edges[i]))
    return choice


def excess(work: Reduction, choice: dict[int, int]) -> float:
    """Return the cost of `choice` above the constant."""
    nodes = sum(float(work.costs[i][k]) for i, k in choice.items())
    return nodes + sum(float(cost[choice[i], choice[j]]) for i, j, cost in _edges(work))


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
