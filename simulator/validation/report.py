"""Writes the comparison with published numbers: tables as CSV, figures as SVG, a summary for the terminal or as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from simulator.files import unwritable
from simulator.report.figure_style import pyplot, save_figure
from simulator.validation.cases import Case, PublishedSet, Unpredicted
from simulator.validation.statistics import Statistics, coverage, statistics


class NothingPredictedError(ValueError):
    """A set without a row that can be compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published set with its cases predicted, and the rows for which that was not possible."""

    published: PublishedSet
    cases: tuple[Case, ...]
    statistics: Statistics
    unpredicted: tuple[Unpredicted, ...] = ()

    @classmethod
    def of(cls, published: PublishedSet, folder: Path | None = None) -> "Comparison":
        """The comparison, with rows of a folder's files where one is given."""
        rows = tuple(published.cases() if folder is None else published.cases(folder))
        cases = tuple(row for row in rows if isinstance(row, Case))
        without = tuple(row for row in rows if isinstance(row, Unpredicted))
        if not cases:
            reasons = "; ".join(f"{row.name}: {row.why}" for row in without) or "there is none"
            raise NothingPredictedError(f"{published.name}: no row to compare: {reasons}")
        return cls(published, cases, statistics(cases, len(without)), without)

    @property
    def met(self) -> bool | None:
        """Whether the target is met, on the rows that nobody fitted where there are some; None without a target."""
        if self.published.target is None:
            return None
        found = self.statistics
        return (found.mape if found.unseen is None else found.unseen) <= self.published.target


def summary(comparisons: Sequence[Comparison]) -> Table:
    """One line per set: rows, how many more could not be predicted and how many were fitted, errors in % (on the unseen rows too), rank correlation, regret, and the
    part of the rows between P10 and P90."""
    table = Table(
        title="Predicted and published, errors in %",
        caption=_coverage_text(comparisons),
        box=box.SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("set", no_wrap=True)
    for column in (
        "n",
        "none",
        "fit",
        "MAPE",
        "goal",
        "unseen",
        "med",
        "P90",
        "max",
        "bias",
        "rho",
        "regret",
        "P10-90",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for comparison in comparisons:
        found, target = comparison.statistics, comparison.published.target
        table.add_row(
            comparison.published.name,
            str(found.count),
            str(found.unpredicted or ""),
            str(found.fitted or ""),
            _percent(found.mape),
            ""
            if target is None
            else f"[{'green' if comparison.met else 'red'}]{_percent(target)}[/]",
            "" if found.unseen is None or not found.fitted else _percent(found.unseen),
            _percent(found.median),
            _percent(found.p90),
            _percent(found.largest),
            f"{100 * found.bias:+.1f}",
            "" if found.spearman is None else f"{found.spearman:.2f}",
            "" if found.regret is None else _percent(found.regret),
            "" if found.covered is None else f"{100 * found.covered:.0f}",
        )
    return table


def _coverage_text(comparisons: Sequence[Comparison]) -> str:
    found = coverage([comparison.cases for comparison in comparisons])
    if found is None:
        return ""
    return (
        f"{100 * found.covered:.0f} % of {found.count} rows that nobody fitted to lie between P10 and P90; "
        f"{100 * found.held_out:.0f} % with widths from the other sets alone"
    )


def as_json(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Statistics and rows of every set, plain values."""
    return [
        {
            "name": comparison.published.name,
            "title": comparison.published.title,
            "unit": comparison.published.unit,
            "source": comparison.published.source,
            "target": comparison.published.target,
            "met": comparison.met,
            "note": comparison.published.note,
            **asdict(comparison.statistics),
            "cases": [asdict(case) | {"error": case.error} for case in comparison.cases],
            "rows_without_prediction": [asdict(row) for row in comparison.unpredicted],
        }
        for comparison in comparisons
    ]


def write_report(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """The tables `summary.csv` and `cases.csv` and the figures `scatter.svg` and `errors.svg` in `folder`; their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
    paths = [folder / name for name in ("summary.csv", "cases.csv", "scatter.svg", "errors.svg")]
    _summary_rows(comparisons).to_csv(paths[0], index=False, float_format="%.4f")
    _case_rows(comparisons).to_csv(paths[1], index=False, float_format="%.5g")
    _draw_scatter(comparisons, paths[2])
    _draw_errors(comparisons, paths[3])
    return paths


def _summary_rows(comparisons: Iterable[Comparison]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "set": comparison.published.name,
            **asdict(comparison.statistics),
            "target": comparison.published.target,
            "source": comparison.published.source,
            "note": comparison.published.note,
        }
        for comparison in comparisons
    )


def _case_rows(comparisons: Iterable[Comparison]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "set": comparison.published.name,
            "case": case.name,
            "unit": comparison.published.unit,
            "measured": case.measured,
            "predicted": case.predicted,
            "error": case.error,
            "fitted": case.fitted,
        }
        for comparison in comparisons
        for case in comparison.cases
    )


def _draw_scatter(comparisons: Sequence[Comparison], path: Path) -> None:
    """Predicted over measured seconds, both logarithmic."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 6))
    shown = [comparison for comparison in comparisons if comparison.published.unit == "s"]
    for number, comparison in enumerate(shown):
        measured = [case.measured for case in comparison.cases]
        predicted = [case.predicted for case in comparison.cases]
        axes.scatter(
            measured,
            predicted,
            s=9,
            marker=_marker(number),
            color=_color(plt, number),
            label=comparison.published.title,
        )
    ends = (
        [f(case.measured for c in shown for case in c.cases) for f in (min, max)]
        if shown
        else [1, 10]
    )
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    axes.legend(fontsize=6, frameon=False)
    save_figure(figure, path)


def _draw_errors(comparisons: Sequence[Comparison], path: Path) -> None:
    """The part of the rows of each set with at most so large an error."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 4.5))
    for number, comparison in enumerate(comparisons):
        errors = sorted(100 * abs(case.error) for case in comparison.cases)
        shares = [(rank + 1) / len(errors) for rank in range(len(errors))]
        axes.step(
            [0.0, *errors],
            [0.0, *shares],
            where="post",
            linewidth=1,
            color=_color(plt, number),
            label=comparison.published.title,
        )
    axes.set(xlim=(0, 30), ylim=(0, 1.02), xlabel="absolute error, %", ylabel="part of the rows")
    axes.legend(fontsize=6, frameon=False, loc="lower right")
    save_figure(figure, path)


def _color(plt: Any, number: int) -> Any:
    return plt.get_cmap("tab20")(number % 20)


def _marker(number: int) -> str:
    return "os^vDPX<>*"[number % 10]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
