"""Lower bounds on a choice problem by moving costs between decisions and their edges, and what they rule out.

Costs are moved so that every choice costs what it did, none is negative, and the constant part grows: it is a lower bound on
all choices, and an option that alone costs more than a known choice is above that bound can go. This is sequential tree-
reweighted message passing (Kolmogorov, PAMI 2006), written as moves of cost; it solves the dual of the linear program that
HiGHS starts from. Layers that repeat pass the bound along as a chain does, in few sweeps.
"""

from collections.abc import Iterable

import numpy as np

from autopar.sharding.presolve import Reduction


def make_finite(work: Reduction) -> None:
    """Replace forbidden costs by one that is more than any allowed choice costs, and make the least cost of everything 0."""
    normalise(work)
    arrays = [*work.costs.values(), *(cost for i, j, cost in _edges(work))]
    enough = 1.0 + sum(float(np.max(cost, where=np.isfinite(cost), initial=0.0)) for cost in arrays)
    for cost in arrays:
        cost[~np.isfinite(cost)] = enough


def normalise(work: Reduction) -> None:
    """Move the least cost of each decision and edge to the constant."""
    for cost in (*work.costs.values(), *(cost for i, j, cost in _edges(work))):
        least = cost.min()
        if np.isfinite(least):
            cost -= least
            work.constant += float(least)


def tell_alike(work: Reduction, best: float) -> None:
    """Forbid what no choice better than `best` can hold, and move costs from edges back to decisions.

    Sweeps leave different costs where an edge does not tell options apart; an integer program is smaller for seeing that.
    """
    if not np.isfinite(best):
        return
    unit = abs(best) or 1.0
    enough = best - work.constant + 1e-6 * unit
    for i, j, cost in list(_edges(work)):
        cost = np.where(cost > enough, np.inf, cost)
        for owner, axis in ((i, 0), (j, 1)):
            reference = (
                np.isfinite(cost).sum(axis=axis).argmax()
            )  # the neighbour's option that most of these may meet
            offset = cost.take(reference, axis=1 - axis)
            offset = np.where(np.isfinite(offset), offset, 0.0)
            work.costs[owner] = work.costs[owner] + offset
            cost = cost - np.expand_dims(offset, 1 - axis)
        cost = np.round(cost / unit, 10) * unit
        work.edges[i][j], work.edges[j][i] = cost, cost.T


def sweep(work: Reduction, order: Iterable[int], best: float) -> dict[int, int]:
    """Visit decisions in `order`: gather what edges cost at least, drop options that can't beat `best`, and pass the rest on.

    Returns a choice made on the way, each decision's best answer to those before it.
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


def settled(work: Reduction, choice: dict[int, int]) -> dict[int, int]:
    """`choice`, each decision changed to its best answer to all others until none changes (Besag, J. R. Stat. Soc. B 1986)."""
    choice = dict(choice)
    rounding = 1e-12 * abs(
        work.constant
    )  # where costs were moved from; it may leave less than nothing
    waiting = dict.fromkeys(choice)
    while waiting:
        i, _ = waiting.popitem()
        answer = work.costs[i].copy()
        for j, pairs in work.edges[i].items():
            answer += pairs[:, choice[j]]
        k = int(answer.argmin())
        now = answer[choice[i]]
        if answer[k] < now - max(
            1e-9 * abs(now), rounding
        ):  # by more than rounding, which could go on forever
            choice[i] = k
            waiting.update(dict.fromkeys(work.edges[i]))
    return choice


def excess(work: Reduction, choice: dict[int, int]) -> float:
    """What `choice` costs above the constant."""
    nodes = sum(float(work.costs[i][k]) for i, k in choice.items())
    return nodes + sum(float(cost[choice[i], choice[j]]) for i, j, cost in _edges(work))


def price(work: Reduction, change: np.ndarray) -> None:
    """Raise the price of what limits bound by `change` (seconds per unit of each limit): what is used above a bound costs.

    With prices that are not negative, the constant stays a lower bound on the choices that keep within the limits.
    """
    for i, uses in work.uses.items():
        work.costs[i] = work.costs[i] + change @ uses
    for i, others in work.pairs.items():
        for j, uses in others.items():
            if i < j:
                work.join(i, j, np.tensordot(change, uses, 1))
    work.constant -= float(change @ work.bounds)
    normalise(work)


def used(work: Reduction, choice: dict[int, int]) -> np.ndarray:
    """What `choice` uses of each limit."""
    total = np.zeros(len(work.bounds))
    for i, k in choice.items():
        total += work.uses[i][:, k]
        for j, uses in work.pairs.get(i, {}).items():
            if i < j:
                total += uses[:, k, choice[j]]
    return total


def _edges(work: Reduction) -> Iterable[tuple[int, int, np.ndarray]]:
    return [(i, j, cost) for i, others in work.edges.items() for j, cost in others.items() if i < j]
