"""Statistics of predictions: errors, rank correlation, regret, and coverage of intervals."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import log

import numpy as np
from numpy.typing import ArrayLike

from simulator.validation.cases import Case, Outcome


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
    from scipy.stats import rankdata  # slow to import

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


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """How well predictions tell steps that run out of memory from those that run.

    Attributes:
        hits: steps that ran out of memory and were predicted to.
        false_alarms: steps that ran, predicted to run out of memory.
        misses: steps that ran out of memory, predicted to fit.
        correct_fits: steps that ran and were predicted to fit.
        groups: groups of alternatives of which at least one ran.
        regret: relative slowdown of the plan with the fastest prediction among those predicted to
            fit, against the fastest that ran, mean over the groups whose choice ran; None without
            such a group.
        failed_choices: groups whose choice ran out of memory, or in which nothing is predicted to
            fit.
    """

    hits: int
    false_alarms: int
    misses: int
    correct_fits: int
    groups: int
    regret: float | None
    failed_choices: int

    @property
    def accuracy(self) -> float:
        """Fraction of the steps whose outcome is predicted."""
        right = self.hits + self.correct_fits
        return right / (right + self.false_alarms + self.misses)

    @property
    def precision(self) -> float | None:
        """Fraction of those predicted to run out of memory that did; None if there is none."""
        predicted = self.hits + self.false_alarms
        return self.hits / predicted if predicted else None

    @property
    def recall(self) -> float | None:
        """Fraction of those that ran out of memory predicted to; None if there is none."""
        happened = self.hits + self.misses
        return self.hits / happened if happened else None


def out_of_memory(outcomes: Sequence[Outcome]) -> OutOfMemory | None:
    """Return the statistics of outcomes; None if there are none."""
    if not outcomes:
        return None
    counts = Counter((row.ran, row.fits) for row in outcomes)
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for row in outcomes:
        groups[row.alternatives].append(row)
    possible = [group for group in groups.values() if any(row.ran for row in group)]
    losses = []
    failed = 0
    for group in possible:
        fitting = [row for row in group if row.fits]
        chosen = min(fitting, key=lambda row: row.predicted, default=None)
        if chosen is None or chosen.measured is None:
            failed += 1
            continue
        losses.append(
            chosen.measured / min(row.measured for row in group if row.measured is not None) - 1
        )
    return OutOfMemory(
        hits=counts[False, False],
        false_alarms=counts[True, False],
        misses=counts[False, True],
        correct_fits=counts[True, True],
        groups=len(possible),
        regret=float(np.mean(losses)) if losses else None,
        failed_choices=failed,
    )
