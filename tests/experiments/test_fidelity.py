"""Compiled programs have the collectives of their plans, or the table gives the reason."""

import csv
from pathlib import Path

import pytest

from experiments.models.model_sizes import SMALL
from experiments.validation.fidelity import (
    CLOSE,
    KINDS,
    TOLERANCE,
    UNEXPLAINED,
    PlanCase,
    QuantityComparison,
    cases,
    compare,
)

TABLE = Path(__file__).parents[2] / "results/tables/fidelity.csv"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_collectives_of_a_small_gpt_are_those_of_its_plan(mesh: tuple[int, ...]) -> None:
    rows = list(compare(PlanCase("gpt", SMALL["gpt"], mesh)))
    assert {"memory", "seconds"} <= {row.quantity for row in rows}
    assert [row for row in rows if row.because == UNEXPLAINED] == []


def test_the_error_is_relative_to_the_program() -> None:
    assert QuantityComparison("m", "8", "c", "s", "all_reduce", 110, 100).error == pytest.approx(
        0.1
    )
    assert QuantityComparison("m", "8", "c", "s", "all_reduce", 1, 0).error == float("inf")


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(TABLE.read_text().splitlines()))


def test_the_committed_table_has_known_cases() -> None:
    found = {tuple(row[key] for key in ("model", "mesh", "cluster", "strategy")) for row in table()}
    assert found == {tuple(str(case).split(" ")) for case in cases()}
    assert len({model for model, *_ in found}) >= 8


def test_every_difference_in_the_committed_table_is_explained() -> None:
    far = [
        row for row in table() if row["quantity"] in KINDS and abs(float(row["error"])) > TOLERANCE
    ]
    assert [row for row in far if row["because"] in ("", UNEXPLAINED)] == []


def test_planned_seconds_and_memory_are_close_to_the_compiled_or_it_is_said_why_not() -> None:
    compared = [row for row in table() if row["quantity"] not in KINDS]
    far = [row for row in compared if abs(float(row["error"])) > CLOSE]
    assert [row for row in far if row["because"].startswith(UNEXPLAINED)] == []
    assert len(far) <= 0.15 * len(compared)
