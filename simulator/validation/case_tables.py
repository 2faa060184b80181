"""A table of the published rows and their predictions, for studies."""

from collections.abc import Collection

import pandas as pd

from simulator.validation.cases import Case
from simulator.validation.published import PUBLISHED_SETS


def published_cases(names: Collection[str]) -> pd.DataFrame:
    """Predict the rows of published sets.

    Args:
        names: names of the sets; none stands for all.

    Returns:
        A row per measurement: `set`, `title`, `source`, `case`, `unit`, `measured` and `predicted`
        in the unit, `fitted` (whether parameters were fitted to it), and `alternatives` (the group
        of plans for the same model, devices and batch; empty for none).

    Raises:
        ValueError: there is no set of a name.
    """
    sets = {published.name: published for published in PUBLISHED_SETS}
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"no published set {unknown[0]!r}; expected some of {', '.join(sets)}")
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
        for published in (sets[name] for name in names or sets)
        for row in published.cases()
        if isinstance(row, Case)
    )
