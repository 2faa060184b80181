"""Public models by method: how many train as on one device."""

import pandas as pd
from matplotlib.figure import Figure

from experiments.paper.paper_style import bar_style, legend_above, new_figure
from experiments.paper.study import Table
from experiments.sources import ROOT

TABLE = "results/tables/reach.csv"
OUTCOMES = ("equal", "predicted", "refused")


def rows(part: str, smoke: bool) -> Table:
    """Return the outcome of every public model and method."""
    del part, smoke
    table: Table = pd.read_csv(ROOT / TABLE)
    # methods for two and four stages are the same method on other devices
    method = table["method"].str.replace(r"_(\d+|\d+x\d+)$", "", regex=True)
    library = table["model"].str.split("/").str[0]
    return pd.DataFrame(
        {
            "library": library,
            "model": table["model"],
            "series": method,
            "method": table["method"],
            "outcome": table["outcome"],
        }
    )


def draw(table: Table) -> Figure:
    """Draw a bar of outcomes for each method."""
    figure = new_figure(2.3)
    axes = figure.subplots()
    counts = table.groupby(["series", "outcome"], sort=False).size().unstack(fill_value=0)
    counts = counts.loc[counts.sum(axis=1).sort_values().index]
    left = 0
    for number, outcome in enumerate(OUTCOMES):
        values = counts[outcome] if outcome in counts else 0 * counts.iloc[:, 0]
        axes.barh(
            counts.index,
            values,
            left=left,
            **bar_style(number, colour=(1, 3, 4)[number]),
            label={"equal": "equal to one device"}.get(outcome, outcome),
        )
        left = left + values
    axes.set_xlabel("pairs of a public model and a method")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    legend_above(figure, axes)
    return figure


def caption(table: Table) -> str:
    """Return the caption."""
    refused = table[table["outcome"] == "refused"]
    wrong = table[~table["outcome"].isin(OUTCOMES)]
    return (
        f"Training steps of {table['model'].nunique()} public models of"
        f" {table['library'].nunique()} libraries by method: equal to one device, predicted, or"
        f" refused with a reason. Of {len(table)} pairs, {len(refused)} are refused and"
        f" {len(wrong)} have another outcome."
    )


def numbers(table: Table) -> dict[str, str]:
    """Return the numbers of the text."""
    return {
        "models": str(table["model"].nunique()),
        "pairs": str(len(table)),
        "refused": str((table["outcome"] == "refused").sum()),
    }
