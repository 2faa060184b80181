"""Grouped bars: step time and memory of every strategy on every mesh."""

from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

# Told apart by colour-blind readers too (Okabe and Ito, 2008). In the order of the table's strategies.
COLOURS = ["#4D4D4D", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442"]

WIDTH = 0.14  # of a bar; meshes are 1 apart
DIAMOND: dict[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "markersize": 4,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
}

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.hashsalt": "autopar",  # the same figure gives the same file
    "svg.fonttype": "none",
}


def draw_cells(cells: pd.DataFrame, source: str) -> Figure:
    """Step time over memory of one model on one platform: a group of bars per mesh, a bar per strategy.

    A diamond marks what a paper reports for the cell, hatching a cell that does not fit in memory, a cross one that failed.

    Args:
        cells: rows of `experiments.report.tables.COLUMNS` of that model and platform.
        source: whose rows become bars, "simulated" or "measured".
    """
    ours, paper = cells[cells["source"] == source], cells[cells["source"] == "paper"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.6), layout="constrained")
        times, memory = figure.subplots(2, 1, sharex=True)
        _draw_bars(times, ours, paper, "step_time_s", 1e-3)
        _draw_bars(memory, ours, paper, "memory_bytes_per_device", 2**30)
        times.set_title(_title(ours), loc="left", fontsize=9)
        times.set_ylabel("step time (ms)")
        memory.set_ylabel("memory per device (GiB)")
        memory.set_xlabel("mesh: devices along each axis")
        figure.legend(handles=_legend(ours, paper), loc="outside right upper", frameon=False)
    return figure


def _draw_bars(axes: Axes, ours: pd.DataFrame, paper: pd.DataFrame, column: str, unit: float) -> None:
    meshes, colours = list(ours["mesh"].unique()), _colours(ours)
    published = {(row.mesh, row.strategy): getattr(row, column) / unit for row in paper.itertuples()}
    for place, mesh in enumerate(meshes):
        group = ours[ours["mesh"] == mesh]
        for i, row in enumerate(group.itertuples()):
            x = place + (i - (len(group) - 1) / 2) * WIDTH
            value = getattr(row, column)
            if pd.isna(value):
                axes.plot(x, 0, "x", color=colours[row.strategy], markersize=4, clip_on=False)
                continue
            hatch = {"hatch": "//////", "edgecolor": "white", "linewidth": 0} if row.status == "out_of_memory" else {}
            axes.bar(x, value / unit, 0.9 * WIDTH, color=colours[row.strategy], **hatch)
            if column == "step_time_s" and pd.notna(row.step_time_std_s):
                axes.errorbar(
                    x, value / unit, row.step_time_std_s / unit, ecolor="#777777", elinewidth=0.8, capsize=1.5
                )
            if (mesh, row.strategy) in published:
                axes.plot(x, published[mesh, row.strategy], **DIAMOND)
    axes.set_xticks(range(len(meshes)), meshes)


def _colours(ours: pd.DataFrame) -> dict[str, str]:
    return dict(zip(ours["strategy"].unique(), cycle(COLOURS), strict=False))


def _legend(ours: pd.DataFrame, paper: pd.DataFrame) -> list[Artist]:
    handles: list[Artist] = [Patch(color=colour, label=name) for name, colour in _colours(ours).items()]
    if len(paper):
        handles.append(Line2D([], [], **DIAMOND, label="published"))
    if (ours["status"] == "out_of_memory").any():
        handles.append(Patch(facecolor="#777777", hatch="//////", edgecolor="white", label="does not fit"))
    if (ours["status"] == "failed").any():
        handles.append(Line2D([], [], linestyle="", marker="x", color="#777777", label="failed"))
    return handles


def _title(ours: pd.DataFrame) -> str:
    first = ours.iloc[0]
    what = f"{first['model']} {first['size']} ({first['parameters'] / 1e6:.1f} M parameters, batch {first['batch']}, {first['dtype']})"
    return f"{what}, {first['source']} on {first['platform']}"


def save_svg(figure: Figure, path: Path) -> None:
    """Write `figure` so that the same figure always gives the same bytes."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None})
