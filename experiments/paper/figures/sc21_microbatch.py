"""Narayanan et al., figures 16 and 17: the size of a microbatch, and recomputation."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.figure_rows import by_series
from experiments.paper.megatron_steps import sized, step, throughput
from experiments.paper.paper_style import draw_lines, new_figure
from experiments.paper.study import Table

LARGE = sized(layers=72, hidden=10240, heads=80)
"""91 billion parameters; the paper does not give the sizes."""
WIDE = sized(layers=80, hidden=12288, heads=96)
"""145 billion parameters."""

PANELS = ("microbatch", "recomputation")


def rows(part: str, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each microbatch, and for each batch with and without recomputation."""
    del part
    for batch in (128,) if smoke else (128, 512):
        for microbatch in (1, 2, 4, 8):
            prediction = step(
                LARGE, 64, tensor=8, pipeline=8, microbatch=microbatch, global_batch=batch
            )
            row = {"panel": PANELS[0], "x": microbatch, "series": f"batch {batch}"}
            yield row | throughput(prediction)
    for batch in (1, 32) if smoke else (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for recompute in ("full", "none"):
            prediction = step(
                WIDE, 128, tensor=8, pipeline=16, global_batch=batch, recompute=recompute
            )
            series = "recomputed" if recompute == "full" else "saved"
            row = {"panel": PANELS[1], "x": batch, "series": series}
            row["sequences_per_s"] = batch / prediction.seconds
            yield row | throughput(prediction)


def draw(table: Table) -> Figure:
    """Draw throughput over the microbatch, and sequences per second over the batch."""
    figure = new_figure(3.0)
    micro, batch = figure.subplots(2, 1)
    draw_lines(micro, table[table["panel"] == PANELS[0]], "x", "ours")
    micro.set(ylim=(0, None), xlabel="microbatch (sequences)", ylabel="TFLOP/s per GPU")
    micro.legend(loc="lower right")
    panel = table[(table["panel"] == PANELS[1]) & (table["fits"].astype(str) == "True")]
    draw_lines(batch, panel, "x", "sequences_per_s")
    batch.set_xscale("log", base=2)
    batch.set(xlabel="batch (sequences)", ylabel="sequences/s", ylim=(0, None))
    batch.legend()
    return figure


def _best_microbatch(table: Table) -> Table:
    panel = table[table["panel"] == PANELS[0]]
    return panel.groupby("series").apply(lambda rows: rows.loc[rows["ours"].idxmax(), "x"])


def _recomputation(table: Table) -> tuple[float, float]:
    """Return by which factor recomputation slows the smallest batch, and speeds up the best."""
    panel = table[(table["panel"] == PANELS[1]) & (table["fits"].astype(str) == "True")]
    rates = by_series(panel, "sequences_per_s", index="x")
    both = rates.dropna()
    slower = (both["recomputed"] / both["saved"]).min()
    return float(slower), float(rates["recomputed"].max() / rates["saved"].max())


def caption(table: Table) -> str:
    """Return the caption."""
    best = ", ".join(f"{size} ({series})" for series, size in _best_microbatch(table).items())
    slower, faster = _recomputation(table)
    return (
        "Throughput by microbatch (91 billion parameters on 64 A100s, above) and, by batch, with"
        " and without full recomputation as far as it fits (145 billion on 128, below); Narayanan"
        " et al., figures 16 and 17, whose claims in words are checked. The sizes of the first"
        f" model are not given; ours have as many parameters. Best microbatch: {best}."
        f" Recomputation slows a batch by up to {1 - slower:.0%}, and the largest batches that fit"
        f" are {faster:.2f} times as fast with it."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    slower, faster = _recomputation(table)
    return {
        "sc21_best_microbatch": (_best_microbatch(table) == 2).all(),
        "sc21_recomputation_slower": 0.2 < 1 - slower < 0.4,
        "sc21_recomputation_faster": faster > 1.5,
    }
