"""Predictions of the quickstart's strategies are close to the published numbers, and rank alike."""

from pathlib import Path
from typing import Any

import pytest

from experiments.models import MLP
from experiments.strategies import STRATEGIES
from simulator.files import read_yaml
from simulator.hardware.cluster import Cluster

PUBLISHED = Path(__file__).parents[2] / "experiments/config/published.yaml"
MODEL = MLP(dim=2048, num_layers=10, batch_size=2048)


def predicted(row: dict[str, Any], cluster: Cluster) -> tuple[float, float]:
    """Return the predicted milliseconds and GiB of a published row."""
    strategy, mesh = STRATEGIES[row["strategy"]], tuple(row["mesh"])
    timeline = strategy.predict(MODEL, mesh, strategy.plan(MODEL, mesh, cluster), cluster).timeline
    return timeline.makespan * 1e3, timeline.peak_bytes / 2**30


@pytest.fixture(scope="module")
def rows():
    """For each strategy (predicted, published) milliseconds and GiB."""
    (paper,) = (paper for paper in read_yaml(PUBLISHED) if paper["model"] == "mlp")
    cluster = Cluster.load(paper["cluster"])
    return {
        row["strategy"]: (
            predicted(row, cluster),
            (row["step_time_ms"], row["memory_gib_per_device"]),
        )
        for row in paper["rows"]
    }


@pytest.mark.parametrize(("quantity", "tolerance"), [(0, 0.10), (1, 0.03)], ids=["time", "memory"])
def test_predictions_are_close_to_published_numbers_and_rank_alike(rows, quantity, tolerance):
    assert sorted(rows) == ["pmap", "serial", "shard"]
    ours = {name: numbers[0][quantity] for name, numbers in rows.items()}
    published = {name: numbers[1][quantity] for name, numbers in rows.items()}
    assert ours == pytest.approx(published, rel=tolerance)
    assert sorted(ours, key=ours.__getitem__) == sorted(published, key=published.__getitem__)
