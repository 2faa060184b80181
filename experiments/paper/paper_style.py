"""The style of the paper's figures, and the kinds of charts that several of them are.

Figures have the width of a column, embedded fonts, no titles, and colours that colour-blind readers
distinguish (Okabe and Ito, 2008). Their lightness differs as well, and series have different
markers or hatches, so that a print in grey is legible.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.study import Table

COLUMN_WIDTH = 3.33
"""Width of a column of the paper, in inches."""

COLOURS = ["#000000", "#E69F00", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#F0E442"]
MARKERS = "osD^vPX*"
HATCHES = ["", "////", "\\\\\\\\", "xxxx", "----", "++++", "||||", "//\\\\"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2))]

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib ships it, so that every machine has it
    "font.size": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType, embedded
    "svg.fonttype": "path",  # glyphs as outlines, embedded
    "svg.hashsalt": "autopar",  # the same figure gives the same file
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw in the style of the paper."""
    with mpl.rc_context(STYLE):
        yield


def new_figure(height: float = 2.1) -> Figure:
    """Return an empty figure of a column's width.

    Args:
        height: its height in inches.
    """
    return Figure(figsize=(COLUMN_WIDTH, height), layout="constrained")


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as PDF and SVG; the same figure gives the same bytes.

    Args:
        figure: the figure.
        stem: the path of the files without suffix.
    """
    nameless: dict[str, Any] = {"Creator": None}
    figure.savefig(
        stem.with_suffix(".pdf"), metadata={**nameless, "Producer": None, "CreationDate": None}
    )
    figure.savefig(stem.with_suffix(".svg"), metadata={**nameless, "Date": None})


def series_style(number: int) -> dict[str, Any]:
    """Return colour, marker and line style of the series with a number."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
    }


def bar_style(number: int, colour: int | None = None) -> dict[str, Any]:
    """Return colour, hatch and outline of the bars of the series with a number.

    Args:
        number: the number of the series.
        colour: the number of its colour; by default the one after its own.
    """
    return {
        "facecolor": COLOURS[(number + 1 if colour is None else colour) % len(COLOURS)],
        "hatch": HATCHES[number % len(HATCHES)],
        "edgecolor": "black",
        "linewidth": 0.4,
    }


def draw_lines(axes: Axes, table: Table, x: str, y: str) -> None:
    """Draw a line for each series of a table.

    Args:
        axes: where to draw.
        table: rows with `series`.
        x: the column of the horizontal axis.
        y: the column of the vertical axis.
    """
    for number, (series, rows) in enumerate(table.groupby("series", sort=False)):
        shown = rows.dropna(subset=[y])
        axes.plot(shown[x], shown[y], label=str(series), **series_style(number))


def draw_bars(
    axes: Axes,
    table: Table,
    *,
    value: str = "ours",
    order: Sequence[str] = (),
) -> None:
    """Draw a bar for each series in each group, and a mark where a number is published.

    A cross at the axis says that a row does not fit in memory, as ours; a plus that the document
    says so.

    Args:
        axes: where to draw.
        table: rows with `group` and `series`, and `published` where there are such numbers.
        value: the column of the bars.
        order: all series, for panels that share a legend but lack some of them.
    """
    groups = list(dict.fromkeys(table["group"]))
    series = list(dict.fromkeys(table["series"]))
    width = 0.84 / len(series)
    marked = False
    # heights of marks at the axis are parts of its height, as a logarithmic one has no zero
    at_axis: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "zorder": 5}
    for number, name in enumerate(series):
        look = order.index(name) if order else number
        rows = table[table["series"] == name]
        places = [
            groups.index(group) + (number - (len(series) - 1) / 2) * width
            for group in rows["group"]
        ]
        axes.bar(
            places,
            rows[value].fillna(0).tolist(),
            width * 0.94,
            label=name,
            **bar_style(look),
        )
        for place, (_, row) in zip(places, rows.iterrows(), strict=True):
            if str(row.get("fits", "")) == "False":
                axes.plot(place, 0.02, "x", color="black", markersize=4, **at_axis)
            if str(row.get("published_fits", "")) == "False":
                axes.plot(place, 0.02, "+", color="#D55E00", markersize=6, **at_axis)
            if "published" in rows and pd.notna(row["published"]):
                label = None if marked else "published"
                axes.plot(place, row["published"], **PUBLISHED_MARK, label=label)
                marked = True
    axes.set_xticks(range(len(groups)), list(map(str, groups)))


def bar_figure(
    table: Table,
    height: float,
    columns: int,
    *,
    value: str = "ours",
    order: Sequence[str] = (),
    **labels: Any,
) -> Figure:
    """Return a figure of bars with a legend above them.

    Args:
        table: as for `draw_bars`, like `value` and `order`.
        height: height of the figure in inches.
        columns: columns of the legend.
        value: the column of the bars.
        order: all series.
        labels: labels and scales of the axes.
    """
    figure = new_figure(height)
    axes = figure.subplots()
    draw_bars(axes, table, value=value, order=order)
    axes.set(**labels)
    legend_above(figure, axes, columns=columns)
    return figure


def family_figure(
    table: Table, names: Mapping[str, str], height: float, *, order: Sequence[str], columns: int = 3
) -> Figure:
    """Return a figure of the rates of each family of models, one below the other.

    Args:
        table: as for `draw_bars`, with `family`; groups are numbers of GPUs.
        names: what families are called in the figure.
        height: height of the figure in inches.
        order: all series.
        columns: columns of the legend.
    """
    figure = new_figure(height)
    panels = list(table.groupby("family", sort=False))
    plots = list(np.atleast_1d(figure.subplots(len(panels), 1)))
    for axes, (family, panel) in zip(plots, panels, strict=True):
        draw_bars(axes, panel.sort_values("group", kind="stable"), order=order)
        axes.set(ylabel="PFLOP/s", xlabel=f"GPUs, {names[str(family)]}")
    legend_above(figure, plots, columns=columns)
    return figure


PUBLISHED_MARK: dict[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "markersize": 3,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "markeredgewidth": 0.7,
    "zorder": 6,
}


def legend_above(figure: Figure, axes: Sequence[Axes] | Axes, columns: int = 3) -> None:
    """Put the legend of some axes above the figure, each entry once."""
    entries: dict[str, Any] = {}
    for one in [axes] if isinstance(axes, Axes) else axes:
        handles, labels = one.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper center",
        ncols=columns,
        columnspacing=1.0,
        borderaxespad=0.1,
    )
