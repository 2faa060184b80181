"""Reports of comparisons with published numbers: CSV tables, SVG figures, a summary, and JSON."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from simulator.files import unwritable, write_text
from simulator.report.figure_style import pyplot, save_figure
from simulator.validation.cases import Case, Outcome, PublishedSet, Unpredicted
from simulator.validation.statistics import (
    OutOfMemory,
    Statistics,
    coverage,
    out_of_memory,
    statistics,
)

_SHOWN_ROWS = 6


class NothingPredictedError(ValueError):
    """A published set without a row that can be predicted."""


def shortened(names: Sequence[str]) -> str:
    """Return the names of the first rows, and the number of the others."""
    more = f" and {len(names) - _SHOWN_ROWS} more" if len(names) > _SHOWN_ROWS else ""
    return ", ".join(names[:_SHOWN_ROWS]) + more


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published set and its predictions.

    Attributes:
        published: the set.
        cases: rows with a prediction.
        statistics: statistics of the cases.
        unpredicted: rows without a prediction.
        outcomes: rows that say whether a step fits in memory.
    """

    published: PublishedSet
    cases: tuple[Case, ...]
    statistics: Statistics
    unpredicted: tuple[Unpredicted, ...] = ()
    outcomes: tuple[Outcome, ...] = ()

    @classmethod
    def of(cls, published: PublishedSet, folder: Path | None = None) -> "Comparison":
        """Predict the rows of a set.

        Args:
            published: the set.
            folder: a folder with other rows of the set; the shipped ones by default.

        Raises:
            NothingPredictedError: no row can be predicted.
        """
        rows = tuple(published.cases() if folder is None else published.cases(folder))
        cases = tuple(row for row in rows if isinstance(row, Case))
        unpredicted = tuple(row for row in rows if isinstance(row, Unpredicted))
        outcomes = tuple(row for row in rows if isinstance(row, Outcome))
        if not cases:
            names: defaultdict[str, list[str]] = defaultdict(list)
            for row in unpredicted:
                names[row.why].append(row.name)
            reasons = "; ".join(f"{shortened(rows)}: {why}" for why, rows in names.items())
            reasons = reasons or "no row has a measured time or memory"
            raise NothingPredictedError(f"{published.name}: no row to compare: {reasons}")
        return cls(published, cases, statistics(cases, len(unpredicted)), unpredicted, outcomes)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """Statistics of the outcomes; None without outcomes."""
        return out_of_memory(self.outcomes)

    @property
    def met(self) -> bool | None:
        """Whether the target is met, on rows to which nothing was fitted if there are some.

        None without a target.
        """
        if self.published.target is None:
            return None
        numbers = self.statistics
        error = numbers.mape if numbers.unseen is None else numbers.unseen
        return error <= self.published.target


def summary(comparisons: Sequence[Comparison]) -> Table:
    """Return a table for the terminal, with a line per set.

    Its columns are: numbers of rows, of rows without a prediction and of fitted rows; errors in %,
    also on unseen rows; rank correlation; regret; and the fraction of rows between P10 and P90, in
    %.
    """
    table = Table(
        title="Predicted and measured, errors in %",
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
        numbers = comparison.statistics
        target = comparison.published.target
        table.add_row(
            comparison.published.name,
            str(numbers.count),
            str(numbers.unpredicted or ""),
            str(numbers.fitted or ""),
            _percent(numbers.mape),
            ""
            if target is None
            else f"[{'green' if comparison.met else 'red'}]{_percent(target)}[/]",
            "" if numbers.unseen is None or not numbers.fitted else _percent(numbers.unseen),
            _percent(numbers.median),
            _percent(numbers.p90),
            _percent(numbers.largest),
            f"{100 * numbers.bias:+.1f}",
            "" if numbers.spearman is None else f"{numbers.spearman:.2f}",
            "" if numbers.regret is None else _percent(numbers.regret),
            "" if numbers.covered is None else f"{100 * numbers.covered:.0f}",
        )
    return table


def memory_summary(comparisons: Sequence[Comparison]) -> Table | None:
    """Return a table of predicted and actual outcomes; None if no set has outcomes.

    Its columns are: steps that ran out of memory, as predicted and not; steps that ran, predicted
    to run out of memory and predicted to fit; accuracy, precision and recall in %; and of choosing
    layouts among those predicted to fit: groups, slowdown against the best in %, and choices that
    ran out of memory.
    """
    outcomes = [row for comparison in comparisons for row in comparison.outcomes]
    if not outcomes:
        return None
    table = Table(title="Steps that run out of memory (OOM)", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("set", no_wrap=True)
    for column in (
        "OOM, predicted",
        "OOM, missed",
        "ran, alarm",
        "ran, fits",
        "accuracy",
        "precision",
        "recall",
        "groups",
        "regret",
        "OOM choices",
    ):
        table.add_column(column, justify="right")
    rows = [(comparison.published.name, comparison.out_of_memory) for comparison in comparisons]
    shown = [(name, numbers) for name, numbers in rows if numbers is not None]
    total = out_of_memory(outcomes)
    if len(shown) > 1 and total is not None:
        shown.append(("all", total))
    for name, numbers in shown:
        counts = (numbers.hits, numbers.misses, numbers.false_alarms, numbers.correct_fits)
        rates = (numbers.accuracy, numbers.precision, numbers.recall)
        table.add_row(
            name,
            *map(str, counts),
            *("" if rate is None else _percent(rate) for rate in rates),
            str(numbers.groups),
            "" if numbers.regret is None else _percent(numbers.regret),
            str(numbers.failed_choices),
        )
    return table


def _coverage_text(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence about the coverage of intervals; empty if too few sets have intervals."""
    overall = coverage([comparison.cases for comparison in comparisons])
    if overall is None:
        return ""
    return (
        f"{100 * overall.covered:.0f} % of {overall.count} rows to which nothing was fitted lie "
        f"between P10 and P90; {100 * overall.held_out:.0f} % with widths from the other sets alone"
    )


def as_json(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Return the statistics and rows of each set as plain values."""
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
            "out_of_memory": None
            if comparison.out_of_memory is None
            else asdict(comparison.out_of_memory),
            "rows_without_prediction": [asdict(row) for row in comparison.unpredicted],
        }
        for comparison in comparisons
    ]


def write_report(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Write the tables `summary.csv` and `cases.csv`, and figures `scatter.svg` and `errors.svg`.

    Args:
        comparisons: the comparisons.
        folder: folder of the files, which is created if it does not exist.

    Returns:
        The paths of the files.

    Raises:
        FileError: the folder or a file can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
    paths = [folder / name for name in ("summary.csv", "cases.csv", "scatter.svg", "errors.svg")]
    write_text(paths[0], _summary_rows(comparisons).to_csv(index=False, float_format="%.4f"))
    write_text(paths[1], _case_rows(comparisons).to_csv(index=False, float_format="%.5g"))
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
    """Draw predicted over measured seconds on logarithmic axes."""
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
    seconds = [case.measured for comparison in shown for case in comparison.cases] or [1, 10]
    ends = [min(seconds), max(seconds)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    axes.legend(fontsize=6, frameon=False)
    save_figure(figure, path)


def _draw_errors(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the cumulative distribution of the absolute error of each set."""
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
