"""Korthikanti et al.: passes of a layer (table 4) and steps (table 5) by what is recomputed."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import draw_bars, legend_above, new_figure
from experiments.paper.study import Table
from simulator.validation import published_cases

_MODES = {
    "baseline": "none",
    "seq_parallel": "sequence",
    "full_recompute": "full",
    "selective": "selective",
    "selective+seq": "selective,\nsequence",
}
"""What a row of table 4 recomputes, and whether it has sequence parallelism."""


def rows(part: str, smoke: bool) -> Table:
    """Return the passes of table 4 and the steps of table 5."""
    del part, smoke
    table: Table = published_cases(("korthikanti-table4", "korthikanti-table5"))
    words = table["case"].str.split(" ", n=1, expand=True)
    is_layer = table["set"] == "korthikanti-table4"
    return pd.DataFrame(
        {
            "table": is_layer.map({True: 4, False: 5}),
            # alternatives of table 4 are the modes of a pass, of table 5 those of a model
            "group": words[1].where(is_layer, words[0]),
            "series": words[0].where(is_layer, words[1]),
            "unit": "s",
            "published": table["measured"],
            "ours": table["predicted"],
        }
    )


def draw(table: Table) -> Figure:
    """Draw the passes of a layer, and the steps."""
    figure = new_figure(3.2)
    layer, steps = figure.subplots(2, 1)
    four = table[table["table"] == 4]
    passes = four.assign(
        group=four["series"].map(_MODES),
        series=four["group"],
        published=1e3 * four["published"],
        ours=1e3 * four["ours"],
    )
    draw_bars(layer, passes)
    layer.set_ylabel("pass of a layer (ms)")
    legend_above(figure, layer)
    draw_bars(steps, table[table["table"] == 5])
    steps.set(ylabel="step (s)", yscale="log")
    steps.legend()
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    deviation = (table["ours"] / table["published"] - 1).abs()
    by_table = deviation.groupby(table["table"]).mean()
    return (
        "Forward and backward pass of a layer with 22B parameters by what the backward pass repeats"
        " and with sequence parallelism (above, Korthikanti et al., table 4), and steps with full"
        " recomputation and with selective recomputation and sequence parallelism (below, table"
        f" 5), on A100s. Mean deviation: {by_table[4]:.1%} and {by_table[5]:.1%}."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    layer = table[table["table"] == 4].pivot(index="series", columns="group", values="ours")
    total = layer.sum(axis=1)
    overhead = total / total["baseline"] - 1
    steps = by_series(table[table["table"] == 5])
    gain = steps["full"] / steps["selective"] - 1
    return {
        "korthikanti_overhead": overhead["selective+seq"] < 0.1 < 0.33 < overhead["full_recompute"],
        "korthikanti_gain": bool(gain.between(0.25, 0.35).all()),
    }
