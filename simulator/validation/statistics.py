"""How far predictions are from measurements, and whether they choose the right plan."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

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
        covered: part of the rows with an interval, and not fitted to, whose measurement is in it; None without such a row. Four fifths
            are aimed at.
        unpredicted: rows that are not among them, as nothing could be predicted.
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
    unpredicted: int = 0


def statistics(cases: Sequence[Case], unpredicted: int = 0) -> Statistics:
    """The statistics of at least one case; none: `ValueError`."""
    if not cases:
        raise ValueError("no cases; expected at least one")
    errors = np.array([case.error for case in cases])
    size = np.abs(errors)
    inside = [distance <= 1 for distance in _distances(cases)]
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
        unpredicted,
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often measurements are in the intervals that predictions give, which four fifths of them should be.

    Attributes:
        count: rows with an interval that nobody fitted to.
        covered: the part of them in their interval.
        held_out: the same if intervals were as wide as four fifths of the rows of all *other* sets need. The rows of one set have
            errors in common, so this says what to expect of a set that nobody has seen.
    """

    count: int
    covered: float
    held_out: float


def coverage(sets: Sequence[Sequence[Case]]) -> Coverage | None:
    """The coverage over several sets; None for fewer than two with intervals."""
    distances = [found for cases in sets if (found := _distances(cases))]
    if len(distances) < 2:
        return None
    count = sum(map(len, distances))
    held_out = 0
    for number, found in enumerate(distances):
        others = [
            each for other in (*distances[:number], *distances[number + 1 :]) for each in other
        ]
        held_out += sum(distance <= np.quantile(others, 0.8) for distance in found)
    return Coverage(
        count,
        sum(each <= 1 for found in distances for each in found) / count,
        float(held_out / count),
    )


def _distances(cases: Sequence[Case]) -> list[float]:
    """From prediction to measurement, in parts of the way to the end of the interval, of rows that nobody fitted to."""
    distances = []
    for case in cases:
        if case.interval is not None and not case.fitted:
            end = case.interval[case.measured > case.predicted]
            distances.append(log(case.measured / case.predicted) / log(end / case.predicted))
    return distances


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
        min(group, key=lambda case: case.predicted).measured / min(case.measured for case in group)
        - 1
        for group in groups.values()
        if len(group) >= 3
    ]
    return float(np.mean(losses)) if losses else None
