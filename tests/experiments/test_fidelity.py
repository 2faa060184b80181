"""The compiled program communicates what the plan says, and the table says why where it doesn't."""

import csv
from pathlib import Path

import pytest

from experiments.models.published import SMALL
from experiments.validation.fidelity import KINDS, TOLERANCE, UNEXPLAINED, Row, compare
from simulator.cluster import Cluster

TABLE = Path(__file__).parents[2] / "results/tables/fidelity.csv"


@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_collectives_of_a_small_gpt_are_those_of_its_plan(mesh: tuple[int, ...]) -> None:
    rows = list(compare("gpt", SMALL["gpt"], mesh, Cluster.load("dgx_a100_80")))
    assert {"memory", "seconds"} <= {row.quantity for row in rows}
    assert [row for row in rows if row.because == UNEXPLAINED] == []


def test_the_error_is_relative_to_the_program() -> None:
    assert Row("m", "8", "all_reduce", 110, 100).error == pytest.approx(0.1)
    assert Row("m", "8", "all_reduce", 1, 0).error == float("inf")


def test_every_difference_in_the_committed_table_is_explained() -> None:
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    assert {row["mesh"] for row in rows} == {"8", "2x4"}
    assert len({row["model"] for row in rows}) >= 8
    far = [row for row in rows if row["quantity"] in KINDS and abs(float(row["error"])) > TOLERANCE]
    assert [row for row in far if row["because"] in ("", UNEXPLAINED)] == []
