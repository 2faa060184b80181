"""Korthikanti et al.: memory of a device (figure 1) and activations by what is saved (figure 7)."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import draw_bars, legend_above, new_figure
from experiments.paper.study import Table
from simulator.validation import published_cases

_SAVED = {
    "seq": "sequence",
    "sel": "selective",
    "seqsel": "selective, sequence",
    "full": "full recomputation",
}
_MODES = {"none": "tensor parallel", "seqsel": "selective, sequence"}


def rows(part: str, smoke: bool) -> Table:
    """Return the memory of figure 1, and the activations of figure 7."""
    del part, smoke
    memory: Table = published_cases(("korthikanti-figure1",))
    words = memory["case"].str.split(" ", expand=True)
    first = memory.assign(figure=1, group=words[0] + " " + words[2], series=words[1].map(_MODES))
    shares: Table = published_cases(("korthikanti-figure7",))
    words = shares["case"].str.split(" ", expand=True)
    second = shares.assign(figure=7, group=words[0], series=words[1].map(_SAVED))
    return pd.concat([first, second]).rename(
        columns={"measured": "published", "predicted": "ours"}
    )[["figure", "group", "series", "unit", "published", "ours"]]


def draw(table: Table) -> Figure:
    """Draw activations of a device, and their share by what is saved."""
    figure = new_figure(3.2)
    memory, shares = figure.subplots(2, 1)
    first = table[(table["figure"] == 1) & table["group"].str.endswith("activations")]
    order = list(dict.fromkeys([*_MODES.values(), *_SAVED.values()]))
    draw_bars(memory, first.assign(group=first["group"].str.split(" ").str[0]), order=order)
    memory.axhline(80, color="#777777", linewidth=0.8, linestyle="--")
    memory.set_ylabel("activations (GiB)")
    draw_bars(shares, table[table["figure"] == 7], order=order)
    shares.set_ylabel("% of activations")
    legend_above(figure, [memory, shares], columns=3)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    deviation = (table["ours"] / table["published"] - 1).abs()
    return (
        "Activations of a device without recomputation and with selective recomputation and"
        " sequence parallelism (above, Korthikanti et al., figure 1; dashed: the memory of an"
        " A100), and activations by what is saved, relative to tensor parallelism alone (below,"
        f" figure 7). Largest deviation of {len(table)} values: {deviation.max():.1%}."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    shares = by_series(table[table["figure"] == 7])
    return {"korthikanti_fifth": bool((shares["selective, sequence"] < 21).all())}
