"""Tables of the published rows and their predictions, for studies."""

from collections.abc import Collection, Iterator

import pandas as pd

from simulator.validation.cases import Case, Outcome, PublishedSet, Unpredicted
from simulator.validation.published import PUBLISHED_SETS


def published_cases(names: Collection[str] = ()) -> pd.DataFrame:
    """Predict the rows of published sets.

    Args:
        names: names of the sets; all by default.

    Returns:
        A row per measurement: `set`, `title`, `source`, `case`, `unit`, `measured` and `predicted`
        in the unit, `fitted` (whether parameters were fitted to it), and `alternatives` (the group
        of plans for the same model, devices and batch; empty for none).

    Raises:
        ValueError: a name is not that of a set.
    """
    return pd.DataFrame(
        {
            "set": published.name,
            "title": published.title,
            "source": published.source,
            "case": row.name,
            "unit": published.unit,
            "measured": row.measured,
            "predicted": row.predicted,
            "fitted": row.fitted,
            "alternatives": row.alternatives,
        }
        for published, row in _rows(names)
        if isinstance(row, Case)
    )


def published_outcomes(names: Collection[str] = ()) -> pd.DataFrame:
    """Predict whether the steps of published sets fit in memory.

    Args:
        names: names of the sets; all by default.

    Returns:
        A row per step of a set that says which ran out of memory: `set`, `case`, `ran`, `fits` (as
        predicted), `measured` seconds if it ran, `predicted` seconds, and `alternatives`.

    Raises:
        ValueError: a name is not that of a set.
    """
    return pd.DataFrame(
        {
            "set": published.name,
            "case": row.name,
            "ran": row.ran,
            "fits": row.fits,
            "measured": row.measured,
            "predicted": row.predicted,
            "alternatives": row.alternatives,
        }
        for published, row in _rows(names)
        if isinstance(row, Outcome)
    )


def _rows(
    names: Collection[str],
) -> Iterator[tuple[PublishedSet, Case | Outcome | Unpredicted]]:
    sets = {published.name: published for published in PUBLISHED_SETS}
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"no published set {unknown[0]!r}; expected some of {', '.join(sets)}")
    for name in names or sets:
        for row in sets[name].cases():
            yield sets[name], row
