"""Narayanan et al.: throughput from 1.7 billion to 530 billion parameters, and beside ZeRO-3."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper.figure_rows import by_series
from experiments.paper.paper_style import PUBLISHED_MARK, legend_above, new_figure, series_style
from experiments.paper.study import Table
from simulator.validation import published_cases, records


def rows(part: str, smoke: bool) -> Table:
    """Return the rows of tables 1 and 2, in TFLOP/s of each GPU."""
    del part, smoke
    cases: Table = published_cases(("sc21-ptd", "sc21-zero3")).set_index(["set", "case"])
    lines = []
    for row in records("megatron_sc21_table1"):
        lines.append(("sc21-ptd", f"{row.params_B}B on {row.gpus}", row, "PTD, table 1"))
    for row in records("megatron_sc21_table2"):
        name = f"{row.params_B}B on {row.gpus}"
        if row.scheme == "ZeRO-3":
            lines.append(("sc21-zero3", name, row, "ZeRO-3"))
        else:
            lines.append(("sc21-ptd", f"{name}, table 2", row, "PTD, table 2"))
    return pd.DataFrame(
        {
            "series": series,
            "group": "weak scaling" if series == "PTD, table 1" else f"{row.params_B}B",
            "parameters_b": row.params_B,
            "gpus": row.gpus,
            "unit": "TFLOP/s per GPU",
            "published": row.tflops_per_gpu,
            # the same FLOP in the predicted instead of the measured time
            "ours": row.tflops_per_gpu * case["measured"] / case["predicted"],
            "seconds": case["predicted"],
            "fitted": case["fitted"],
        }
        for name_of_set, name, row, series in lines
        for case in [cases.loc[(name_of_set, name)]]
    )


def draw(table: Table) -> Figure:
    """Draw TFLOP/s of each GPU over the number of GPUs."""
    figure = new_figure(2.2)
    axes = figure.subplots()
    marked = False
    for number, (series, shown) in enumerate(table.groupby("series", sort=False)):
        style = series_style(number)
        if series != "PTD, table 1":
            style["linestyle"] = ""
        axes.plot(shown["gpus"], shown["ours"], label=series, **style)
        label = None if marked else "published"
        axes.plot(shown["gpus"], shown["published"], label=label, **PUBLISHED_MARK)
        marked = True
    axes.set(xscale="log", ylim=(0, None), xlabel="GPUs", ylabel="TFLOP/s per GPU")
    axes.set_xticks([32, 128, 512, 2048], ["32", "128", "512", "2048"])
    axes.minorticks_off()
    legend_above(figure, axes, columns=4)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    scaling = table[table["series"] == "PTD, table 1"]
    deviation = (table["ours"] / table["published"] - 1).abs()
    return (
        f"Throughput of GPTs with {scaling['parameters_b'].min():g} to"
        f" {scaling['parameters_b'].max():g} billion parameters on {scaling['gpus'].min()} to"
        f" {scaling['gpus'].max()} A100s (Narayanan et al., tables 1 and 2). Table 1 does not give"
        " microbatch and interleaving: ours are the fastest that fit. Mean deviation:"
        f" {deviation.mean():.1%}. The contention of ZeRO-3's communication is fitted to its rows."
    )


def claims(table: Table) -> dict[str, bool]:
    """Return whether the paper's claims hold for our rows."""
    scaling = table[table["series"] == "PTD, table 1"].sort_values("gpus")
    others = table[table["series"] != "PTD, table 1"]
    by_model = by_series(others)
    return {
        "sc21_superlinear": scaling["ours"].iloc[-1] > scaling["ours"].iloc[0],
        "sc21_zero3": (by_model["PTD, table 2"] > by_model["ZeRO-3"]).all(),
    }
