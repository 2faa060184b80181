"""A figure shows every cell of a model, published numbers, and cells that failed or do not fit."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.report.bar_charts import CellRow, draw_cells, save_svg

COMMON = {
    "model": "mlp",
    "size": "tiny",
    "parameters": 1_000_000,
    "batch": 8,
    "dtype": "float32",
    "platform": "p3.16xlarge",
}
COLUMNS = [
    "mesh",
    "strategy",
    "source",
    "step_time_s",
    "step_time_std_s",
    "memory_bytes_per_device",
    "status",
]


@pytest.fixture
def cells() -> list[CellRow]:
    rows = [
        ["1", "serial", "simulated", 0.100, None, 2**30, "ok"],
        ["2", "data", "simulated", 0.060, None, 2**31, "out_of_memory"],
        ["2", "shard", "simulated", None, None, None, "failed"],
        ["2", "data", "paper", 0.050, 0.001, 2**30, "ok"],
        ["2", "data", "measured", 9.000, 0.100, 2**30, "ok"],
    ]
    return [COMMON | dict(zip(COLUMNS, row, strict=True)) for row in rows]


def bars(figure: Figure, axes: int) -> list[Rectangle]:
    return [patch for patch in figure.axes[axes].patches if isinstance(patch, Rectangle)]


def test_each_cell_of_the_source_is_a_bar_of_its_height(cells: list[CellRow]) -> None:
    figure = draw_cells(cells, "simulated")
    assert [bar.get_height() for bar in bars(figure, 0)] == pytest.approx([100, 60])
    assert [bar.get_height() for bar in bars(figure, 1)] == [1, 2]


def test_published_numbers_are_diamonds_on_their_bars_and_failures_crosses(
    cells: list[CellRow],
) -> None:
    figure = draw_cells(cells, "simulated")
    marks = {
        line.get_marker(): np.asarray(line.get_xydata()).ravel() for line in figure.axes[0].lines
    }
    bar = bars(figure, 0)[1]
    assert marks["D"] == pytest.approx((bar.get_x() + bar.get_width() / 2, 50))
    assert marks["x"] == pytest.approx((1 + 0.14 / 2, 0))  # right of the middle of the second group
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["serial", "data", "shard", "published", "does not fit", "failed"]
    cells[1] |= {"step_time_s": None, "memory_bytes_per_device": None}
    legend = draw_cells(cells, "simulated").legends[0].get_texts()
    assert [text.get_text() for text in legend][-2:] == ["published", "failed or no plan fits"]


def test_the_same_table_gives_the_same_file(cells: list[CellRow], tmp_path: Path) -> None:
    for name in ("one", "other"):
        save_svg(draw_cells(cells, "simulated"), tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert "<dc:date>" not in (tmp_path / "one.svg").read_text()
