"""How far predictions are from measurements, and whether they choose the right plan."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from simulator.validation.cases import Case


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of relative errors.

    Attributes:
        count: rows, all of them; `fitted` is how many of those parameters were fitted to.
        mape: mean absolute error.
        unseen: the same over the rows that nobody fitted; None without such a row.
        bias: mean error.
        spearman: rank correlation of predicted and measured; None for fewer than three rows.
        covered: part of the rows with an interval whose measurement is in it; None without such a row. Four fifths are aimed at.
        regret: by how much the plan that is predicted to be the fastest is slower than the fastest, mean over the groups of at
            least three alternatives; None without such a group.
    """

    count: int
    fitted: int
    mape: float
    unseen: float | None
    median: float
    p90: float
    largest: float
    bias: float
    spearman: float | None
    regret: float | None
    covered: float | None


def statistics(cases: Sequence[Case]) -> Statistics:
    """The statistics of at least one case; none: `ValueError`."""
    if not cases:
        raise ValueError("no cases; expected at least one")
    errors = np.array([case.error for case in cases])
    size = np.abs(errors)
    inside = [case.interval[0] <= case.measured <= case.interval[1] for case in cases if case.interval is not None]
    unseen = np.array([not case.fitted for case in cases])
    return Statistics(
        len(cases),
        sum(case.fitted for case in cases),
        float(size.mean()),
        float(size[unseen].mean()) if unseen.any() else None,
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(errors.mean()),
        spearman([case.predicted for case in cases], [case.measured for case in cases]),
        regret(cases),
        float(np.mean(inside)) if inside else None,
    )


def spearman(one: ArrayLike, other: ArrayLike) -> float | None:
    """The correlation of ranks; None for fewer than three pairs, or where all values are the same."""
    ranks = np.array([rankdata(one), rankdata(other)])
    if ranks.shape[1] < 3 or (np.ptp(ranks, axis=1) == 0).any():
        return None
    return float(np.corrcoef(ranks)[0, 1])


def regret(cases: Sequence[Case]) -> float | None:
    """By how much choosing by prediction costs, over the groups of at least three alternatives."""
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.alternatives:
            groups[case.alternatives].append(case)
    losses = [
        min(group, key=lambda case: case.predicted).measured / min(case.measured for case in group) - 1
        for group in groups.values()
        if len(group) >= 3
    ]
    return float(np.mean(losses)) if losses else None
