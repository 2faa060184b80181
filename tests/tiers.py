"""Choose which combinations of parameters run in the fast tier, which in the slow one, and which in neither.

A defect mostly shows for one value or for a pair of values, so arrays that cover all of them replace full products (Kuhn, Wallace and
Gallo, "Software fault interactions and implications for software testing", IEEE TSE 30(6), 2004).
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(rows: Sequence[tuple[Any, ...]], strength: int) -> list[tuple[Any, ...]]:
    """Return rows, in their order, that have every combination of `strength` values that stands in any of `rows`.

    The row with the most combinations that are missing is taken first, the first one of equals.
    """

    def combined(row: int) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(map(repr, rows[row])), strength))

    missing = set().union(*map(combined, range(len(rows))))
    taken: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda row: len(combined(row) & missing))
        taken.add(best)
        missing -= combined(best)
    return [row for number, row in enumerate(rows) if number in taken]


def slow(*values: Any) -> list[Any]:
    """Return values of one parameter as slow ones."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def tiers(rows: Sequence[Any]) -> list[Any]:
    """Return parameters for `rows`: those that cover each value once are fast, the others slow.

    A row is a tuple of values; rows of one parameter are given without, and the first of them is fast.
    """
    several = all(isinstance(row, tuple) for row in rows)
    fast = covering(rows, 1) if several else rows[:1]
    kept = set(map(repr, fast))
    marks = [() if repr(row) in kept else (pytest.mark.slow,) for row in rows]
    return [
        pytest.param(*row, marks=mark) if several else pytest.param(row, marks=mark)
        for row, mark in zip(rows, marks, strict=True)
    ]


def pairs(*values: Sequence[Any]) -> list[Any]:
    """Return parameters with every pair of two parameters' values: some of them are fast, the others slow (`tiers`)."""
    return tiers(covering(list(product(*values)), 2))
