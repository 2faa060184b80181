"""Bar charts of the step time and memory of every strategy on every mesh."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

type CellRow = Mapping[str, Any]

# Colour-blind readers can distinguish them (Okabe and Ito, 2008; the last six are Tol's).
COLOURS = ["#4D4D4D", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442"]
COLOURS += ["#882255", "#332288", "#999933", "#44AA99", "#DDCC77", "#AA4499"]
"""Colours of the strategies, in the order of the table."""

WIDTH = 0.14
"""Largest width of a bar, where the distance between meshes is 1."""

DIAMOND: dict[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "markersize": 4,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
}

HATCH: dict[str, Any] = {"hatch": "//////", "edgecolor": "white", "linewidth": 0}

STYLE: dict[Any, Any] = {
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


def draw_cells(rows: Sequence[CellRow], source: str) -> Figure:
    """Draw step time and memory of one model on one platform, one below the other.

    Each mesh is a group of bars, each strategy a bar. A diamond marks what a paper reports for the
    cell, hatching a cell that does not fit in memory, a cross one that failed or has no plan that
    fits.

    Args:
        rows: the rows of that model and platform in the table of cells, whose columns are
            `experiments.report.cell_table.COLUMNS`.
        source: which rows become bars, "simulated" or "measured".
    """
    ours = [row for row in rows if row["source"] == source]
    paper = [row for row in rows if row["source"] == "paper"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.6), layout="constrained")
        times, memory = figure.subplots(2, 1, sharex=True)
        _draw_bars(times, ours, paper, "step_time_s", 1e-3)
        unit, unit_name = _memory_unit(ours)
        _draw_bars(memory, ours, paper, "memory_bytes_per_device", unit)
        times.set_title(_title(ours[0]), loc="left", fontsize=9)
        times.set_ylabel("step time (ms)")
        memory.set_ylabel(f"memory per device ({unit_name})")
        memory.set_xlabel("mesh: devices along each axis")
        figure.legend(handles=_legend(ours, paper), loc="outside right upper", frameon=False)
    return figure


def _draw_bars(
    axes: Axes, ours: Sequence[CellRow], paper: Sequence[CellRow], column: str, unit: float
) -> None:
    meshes, colours = list(dict.fromkeys(row["mesh"] for row in ours)), _colours(ours)
    published = {(row["mesh"], row["strategy"]): row[column] / unit for row in paper}
    width = min(WIDTH, 0.9 / max(Counter(row["mesh"] for row in ours).values()))
    for place, mesh in enumerate(meshes):
        group = [row for row in ours if row["mesh"] == mesh]
        for i, row in enumerate(group):
            x = place + (i - (len(group) - 1) / 2) * width
            colour = colours[row["strategy"]]
            if row[column] is None:
                axes.plot(x, 0, "x", color=colour, markersize=4, clip_on=False)
                continue
            hatch: dict[str, Any] = HATCH if row["status"] == "out_of_memory" else {}
            axes.bar(x, row[column] / unit, 0.9 * width, facecolor=colour, **hatch)
            if column == "step_time_s" and row["step_time_std_s"] is not None:
                spread = row["step_time_std_s"] / unit
                axes.errorbar(
                    x, row[column] / unit, spread, ecolor="#777777", elinewidth=0.8, capsize=1.5
                )
            if (mesh, row["strategy"]) in published:
                axes.plot(x, published[mesh, row["strategy"]], **DIAMOND)
    axes.set_xticks(range(len(meshes)), meshes)


def _memory_unit(ours: Sequence[CellRow]) -> tuple[int, str]:
    largest = max((row["memory_bytes_per_device"] or 0 for row in ours), default=0)
    return (2**20, "MiB") if largest < 2**29 else (2**30, "GiB")


def _colours(ours: Sequence[CellRow]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(row["strategy"] for row in ours), cycle(COLOURS), strict=False))


def _legend(ours: Sequence[CellRow], paper: Sequence[CellRow]) -> list[Artist]:
    handles: list[Artist] = [
        Patch(facecolor=colour, label=name) for name, colour in _colours(ours).items()
    ]
    if paper:
        handles.append(Line2D([], [], **DIAMOND, label="published"))
    not_fitting = [row for row in ours if row["status"] == "out_of_memory"]
    if any(row["step_time_s"] is not None for row in not_fitting):
        handles.append(Patch(facecolor="#777777", **HATCH, label="does not fit"))
    has_failed = any(row["status"] == "failed" for row in ours)
    is_unplanned = any(row["step_time_s"] is None for row in not_fitting)
    crosses = ["failed"] * has_failed + ["no plan fits"] * is_unplanned
    if crosses:
        label = " or ".join(crosses)
        handles.append(Line2D([], [], linestyle="", marker="x", color="#777777", label=label))
    return handles


def _title(row: CellRow) -> str:
    sizes = f"{row['parameters'] / 1e6:.1f} M parameters, batch {row['batch']}, {row['dtype']}"
    return f"{row['model']} {row['size']} ({sizes}), {row['source']} on {row['platform']}"


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure always gives the same bytes."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
