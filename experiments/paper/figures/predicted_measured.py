"""Predicted against measured seconds of every public row."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.paper.paper_style import COLOURS, LINES, MARKERS, new_figure
from experiments.paper.study import Table
from simulator.validation import published_cases

FAMILIES = {
    "Megatron-LM": ("korthikanti", "sc21", "vtrain", "mt-nlg", "megatron-core", "dlperf"),
    "FSDP": ("llm-foundry",),
    "NeMo, Megatron-Bridge": ("dgxc", "nemo", "long-sequence", "megatron-bridge", "mlperf"),
    "layouts of Llama": ("layouts",),
    "others": ("",),
}
"""Names of families of sets, and how the names of their sets start."""

_SMOKE_SETS = ("korthikanti-table5", "sc21-ptd", "llm-foundry")


def rows(part: str, smoke: bool) -> Table:
    """Return all published rows with a prediction."""
    del part
    table: Table = published_cases(_SMOKE_SETS if smoke else ())
    named = {"measured": "published", "predicted": "ours", "case": "series"}
    family = [_family(name) for name in table["set"]]
    groups = table["set"] + " " + table["alternatives"]
    columns = ["set", "case", "unit", "measured", "predicted", "fitted"]
    # rows of a set without alternatives have no order, so each is a group of its own
    groups = groups.where(table["alternatives"] != "", table["set"] + " " + table["case"])
    return table[columns].rename(columns=named).assign(family=family, group=groups)


def _family(name: str) -> str:
    return next(
        family
        for family, starts in FAMILIES.items()
        if any(name.startswith(start) for start in starts)
    )


def draw(table: Table) -> Figure:
    """Draw predicted over measured seconds, and the distribution of errors."""
    figure = new_figure(3.9)
    scatter, errors = figure.subplots(2, 1, height_ratios=[1.7, 1])
    seconds = table[table["unit"] == "s"]
    for number, family in enumerate(FAMILIES):
        shown = seconds[seconds["family"] == family]
        if shown.empty:
            continue
        style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number]}
        scatter.scatter(
            shown["published"], shown["ours"], s=5, linewidths=0, alpha=0.8, label=family, **style
        )
        deviations = np.sort(100 * (shown["ours"] / shown["published"] - 1).abs())
        shares = np.arange(1, len(deviations) + 1) / len(deviations)
        errors.step(
            [0, *deviations],
            [0, *shares],
            where="post",
            color=COLOURS[number],
            linestyle=LINES[number],
            label=family,
        )
    ends = [seconds[["published", "ours"]].min().min(), seconds[["published", "ours"]].max().max()]
    scatter.plot(ends, ends, color="#777777", linewidth=0.6)
    scatter.set(xscale="log", yscale="log", xlabel="measured (s)", ylabel="predicted (s)")
    scatter.legend(loc="upper left", markerscale=1.5)
    errors.legend(loc="lower right")
    errors.set(xlim=(0, None), ylim=(0, 1.02), xlabel="deviation (%)", ylabel="part of the rows")
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    seconds = table[table["unit"] == "s"]
    unseen = seconds[~seconds["fitted"]]
    deviation = (unseen["ours"] / unseen["published"] - 1).abs()
    return (
        f"Predicted against measured seconds of {len(seconds)} published steps of"
        f" {seconds['set'].nunique()} sets, and how their deviations are distributed. Nothing was"
        f" fitted to {len(unseen)} of them; of these the mean deviation is {deviation.mean():.1%},"
        f" the median {deviation.median():.1%}, and nine of ten are within"
        f" {deviation.quantile(0.9):.1%}."
    )


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text."""
    unseen = table[(table["unit"] == "s") & ~table["fitted"]]
    deviation = (unseen["ours"] / unseen["published"] - 1).abs()
    return {
        "unseen": str(len(unseen)),
        "unseen_mean": f"{deviation.mean():.1%}",
        "unseen_median": f"{deviation.median():.1%}",
        "sets": str(table["set"].nunique()),
    }
