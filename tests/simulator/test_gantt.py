"""Gantt charts of timelines are reproducible SVG files."""

from pathlib import Path

from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.report.gantt import save_gantt
from tests.simulator.bodies import COSTS
from tests.simulator.test_breakdown import PIPELINE


def test_a_chart_has_a_row_per_mesh_and_is_reproducible(tmp_path: Path) -> None:
    timeline = simulate(PIPELINE, Cluster.load("cpu-virtual"), COSTS)
    paths = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in paths:
        save_gantt(timeline, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = paths[0].read_text()  # matplotlib writes each text as a comment beside its glyphs
    assert all(
        f"<!-- {label} -->" in text
        for label in ("mesh 0", "mesh 1", "forward", "backward", "update")
    )
    assert "whole step" not in text


def test_an_empty_timeline_is_drawn(tmp_path: Path) -> None:
    save_gantt(Timeline((), ((0,),)), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
