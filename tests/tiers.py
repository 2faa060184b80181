"""Covering arrays of test parameters, split into the fast and the slow tier of tests.

Most defects depend on one value or on a pair of values, so an array that covers all pairs replaces
the full product (Kuhn, Wallace and Gallo, "Software fault interactions and implications for
software testing", IEEE TSE 30(6), 2004).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(rows: Sequence[tuple[Any, ...]], strength: int) -> list[tuple[Any, ...]]:
    """Return some of the `rows`, in order, with every combination of `strength` values in them.

    The subset is chosen greedily: each time the first row with the most missing combinations.
    """

    def combinations_of(row: int) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(map(repr, rows[row])), strength))

    missing = set().union(*map(combinations_of, range(len(rows))))
    selected: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda row: len(combinations_of(row) & missing))
        selected.add(best)
        missing -= combinations_of(best)
    return [row for number, row in enumerate(rows) if number in selected]


def slow(*values: Any) -> list[Any]:
    """Return the values of one parameter, marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def fast(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, of which the chosen ones are fast, the others slow."""
    texts = set(map(repr, chosen))
    return [
        pytest.param(value, marks=() if repr(value) in texts else (pytest.mark.slow,))
        for value in values
    ]


def tiers(rows: Sequence[Any]) -> list[Any]:
    """Return parameters for `rows`: a subset that covers each value once is fast, the others slow.

    A row is a tuple of values, or a single value, of which the first is fast.
    """
    several = all(isinstance(row, tuple) for row in rows)
    covered = covering(rows, 1) if several else rows[:1]
    fast_texts = set(map(repr, covered))
    marks = [() if repr(row) in fast_texts else (pytest.mark.slow,) for row in rows]
    return [
        pytest.param(*row, marks=mark) if several else pytest.param(row, marks=mark)
        for row, mark in zip(rows, marks, strict=True)
    ]


def pairs(*values: Sequence[Any]) -> list[Any]:
    """Return parameters that cover each pair of values of any two parameters, in `tiers`."""
    return tiers(covering(list(product(*values)), 2))
