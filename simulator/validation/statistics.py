"""Statistics of predictions: errors, rank correlation, regret, and coverage of intervals."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import log

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from simulator.validation.cases import Case


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the relative errors of several cases.

    Attributes:
        count: number of cases.
        fitted: number of cases to which parameters were fitted.
        mape: mean absolute error.
        unseen: mean absolute error over cases to which nothing was fitted; None without such a
            case.
        median: median of the absolute error.
        p90: 90th percentile of the absolute error.
        largest: largest absolute error.
        bias: mean error.
        spearman: rank correlation of predicted and measured; None for fewer than three cases.
        regret: `regret` of the cases.
        covered: fraction of measurements in their interval, over cases with an interval to which
            nothing was fitted; None without such a case. Intervals are meant to contain four
            fifths.
        unpredicted: number of further rows without a prediction.
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
    """Return the statistics of cases.

    Args:
        cases: at least one case.
        unpredicted: number of further rows without a prediction.

    Raises:
        ValueError: there are no cases.
    """
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
    """Fractions of measurements in the intervals of predictions, which should be four fifths.

    Attributes:
        count: number of cases with an interval to which nothing was fitted.
        covered: fraction of them in their interval.
        held_out: fraction of them in intervals that are as wide as to contain four fifths of the
            cases of all *other* sets. Cases of one set have common errors, so this is what to
            expect of a new set.
    """

    count: int
    covered: float
    held_out: float


def coverage(sets: Sequence[Sequence[Case]]) -> Coverage | None:
    """Return the coverage over several sets; None if fewer than two have intervals."""
    distances = [_distances(cases) for cases in sets]
    distances = [of_set for of_set in distances if of_set]
    if len(distances) < 2:
        return None
    count = sum(map(len, distances))
    held_out = 0
    for number, of_set in enumerate(distances):
        others = list(chain(*distances[:number], *distances[number + 1 :]))
        held_out += sum(distance <= np.quantile(others, 0.8) for distance in of_set)
    covered = sum(distance <= 1 for distance in chain(*distances))
    return Coverage(count, covered / count, float(held_out / count))


def _distances(cases: Sequence[Case]) -> list[float]:
    """Return the logarithmic distance of each measurement from its prediction.

    The unit is the distance of the end of the interval. Cases to which parameters were fitted are
    left out.
    """
    distances = []
    for case in cases:
        if case.interval is not None and not case.fitted:
            end = case.interval[case.measured > case.predicted]
            distances.append(log(case.measured / case.predicted) / log(end / case.predicted))
    return distances


def spearman(one: ArrayLike, other: ArrayLike) -> float | None:
    """Return the correlation of ranks; None for fewer than three pairs, or equal values."""
    ranks = np.array([rankdata(one), rankdata(other)])
    if ranks.shape[1] < 3 or (np.ptp(ranks, axis=1) == 0).any():
        return None
    return float(np.corrcoef(ranks)[0, 1])


def regret(cases: Sequence[Case]) -> float | None:
    """Return the loss of choosing plans by prediction.

    It is the relative slowdown of the plan with the fastest prediction against the fastest plan,
    mean over groups of at least three alternatives; None without such a group.
    """
    groups: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.alternatives:
            groups[case.alternatives].append(case)
    losses = []
    for group in groups.values():
        if len(group) >= 3:
            chosen = min(group, key=lambda case: case.predicted)
            losses.append(chosen.measured / min(case.measured for case in group) - 1)
    return float(np.mean(losses)) if losses else None
