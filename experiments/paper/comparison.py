"""Comparison of a figure's rows with published numbers and with the claims of its document.

Rows that are compared have these columns, beside those of their figure: `group` and `series` name
the row, and the alternatives in one group are ordered by their values; `unit`, `published` and
`ours` are its values; `published_fits` and `fits` say whether it fits in memory.
"""

from dataclasses import asdict, dataclass
from itertools import combinations

import pandas as pd

from experiments.paper.published_values import Claim
from experiments.paper.study import Table

NEAR = 0.02
"""Published values that differ by less have no order."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a figure agrees with its document.

    Attributes:
        figure: name of the figure.
        rows: number of rows.
        failed: number of parts that failed.
        compared: rows with a published number and one of ours.
        mean_deviation: mean absolute deviation from the published numbers.
        largest_deviation: largest absolute deviation.
        pairs: pairs of alternatives whose order is published.
        pairs_kept: pairs in the published order.
        memory_rows: rows for which it is published whether they fit in memory.
        memory_agrees: rows for which we agree.
        claims: claims in words that are checked.
        claims_kept: claims that hold for our rows.
    """

    figure: str
    rows: int
    failed: int
    compared: int
    mean_deviation: float | None
    largest_deviation: float | None
    pairs: int
    pairs_kept: int
    memory_rows: int
    memory_agrees: int
    claims: int
    claims_kept: int

    def as_row(self) -> dict[str, object]:
        """Return the agreement as a row of a table."""
        return asdict(self)


def agreement(name: str, table: Table, claims: dict[Claim, bool]) -> Agreement:
    """Compare the rows of a figure with its document.

    Args:
        name: name of the figure.
        table: its rows.
        claims: whether each of the document's claims holds.
    """
    good = table[table["status"] == "ok"]
    deviations = compared_rows(good)["deviation"].abs()
    kept = [order for group in _groups(good) for order in _orders(group)]
    memory = _column(good, "published_fits").notna() & _column(good, "fits").notna()
    agrees = _truth(good[memory], "published_fits") == _truth(good[memory], "fits")
    return Agreement(
        figure=name,
        rows=len(good),
        failed=len(table) - len(good),
        compared=len(deviations),
        mean_deviation=float(deviations.mean()) if len(deviations) else None,
        largest_deviation=float(deviations.max()) if len(deviations) else None,
        pairs=len(kept),
        pairs_kept=sum(kept),
        memory_rows=int(memory.sum()),
        memory_agrees=int(agrees.sum()),
        claims=len(claims),
        claims_kept=sum(claims.values()),
    )


def compared_rows(table: Table) -> Table:
    """Return the rows with a published number and one of ours, and their relative `deviation`."""
    both = _column(table, "published").notna() & _column(table, "ours").notna()
    rows = table[both]
    return rows.assign(deviation=rows["ours"] / rows["published"] - 1 if len(rows) else [])


def _groups(table: Table) -> list[Table]:
    """Return the compared rows of each group of alternatives."""
    rows = compared_rows(table)
    names = [name for name in ("group", "unit") if name in rows]
    if rows.empty or "group" not in names:
        return []
    return [group for _, group in rows.groupby(names, sort=False, dropna=False)]


def _orders(group: Table) -> list[bool]:
    """Return for each pair of alternatives with a published order whether ours is the same."""
    orders = []
    for (_, one), (_, other) in combinations(group.iterrows(), 2):
        published = one["published"] - other["published"]
        if abs(published) > NEAR * max(one["published"], other["published"]):
            orders.append(published * (one["ours"] - other["ours"]) > 0)
    return orders


def _column(table: Table, name: str) -> Table:
    return table[name] if name in table else pd.Series(None, index=table.index, dtype=object)


def _truth(table: Table, name: str) -> Table:
    """Return a column of truth values, which CSV files have as text."""
    return _column(table, name).astype(str) == "True"
