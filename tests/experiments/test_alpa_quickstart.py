"""Predictions of the quickstart's strategies are close to the published numbers, and rank alike."""

import pytest

from experiments.validation.alpa_quickstart import compare
from simulator.hardware.cluster import Cluster


@pytest.fixture(scope="module")
def rows():
    return tuple(compare(Cluster.load("p3.16xlarge")))


def test_every_time_is_within_ten_percent_of_the_published_one(rows):
    assert [row.strategy for row in rows if abs(row.seconds_error) > 0.10] == []


def test_every_memory_is_within_three_percent_of_the_published_one(rows):
    assert [row.strategy for row in rows if abs(row.memory_error) > 0.03] == []


def test_the_strategies_rank_as_published(rows):
    assert sorted(rows, key=lambda row: row.seconds) == sorted(
        rows, key=lambda row: row.published.seconds
    )
    assert sorted(rows, key=lambda row: row.memory_gib) == sorted(
        rows, key=lambda row: row.published.memory_gib
    )
