"""The subcommand `validate`: predictions beside published measurements."""

from collections.abc import Iterable, Sequence
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from simulator.cli.common_options import Json, print_json, print_table, print_written
from simulator.cli.error_lines import NO, usage_errors
from simulator.cli.progress_bars import progress_bar
from simulator.report.figure_style import pyplot
from simulator.validation.cases import PublishedSet
from simulator.validation.published import PUBLISHED_SETS
from simulator.validation.report import (
    Comparison,
    NothingPredictedError,
    memory_summary,
    shortened,
    summary,
    write_report,
)
from simulator.validation.report import (
    as_json as comparisons_json,
)
from simulator.validation.sets.steps import sets_of_rows
from simulator.validation.step_rows import read_step_table
from simulator.validation.step_software import unknown_frameworks

_DEFAULT_FOLDER = Path("results/validation")
_MIN_WIDTH = 86


def validate(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of published sets; all by default.",
            autocompletion=lambda: [published.name for published in PUBLISHED_SETS],
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with other rows of these sets, as CSV files of the same names and"
            " columns; sets without a file there are left out. Or a CSV file of your own training"
            " steps, with the columns of the reference.",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(help="Columns, with commas between, that divide your own steps into sets."),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder for tables and figures; by default {_DEFAULT_FOLDER} if it exists, and"
            " none with --data."
        ),
    ] = None,
    write: Annotated[bool, typer.Option(help="Write tables and figures.")] = True,
    as_json: Json = False,
    worst: Annotated[
        int,
        typer.Option(min=0, help="Also show this many rows of each set with the largest errors."),
    ] = 0,
) -> None:
    """Compare predictions with published measurements.

    Prints errors, rank correlation, and the cost of choosing plans by prediction. The exit code is
    1 if the error of a set is above its target.
    """
    if output is None and data is None and _DEFAULT_FOLDER.is_dir():
        output = _DEFAULT_FOLDER
    if not write:
        output = None
    with usage_errors():
        chosen = _selected_sets(sets or [], data, [name for name in by.split(",") if name])
        if output is not None:
            if exists(output) and not isdir(output):
                raise ValueError(f"{output}: can't be written (it is a file); expected a folder")
            pyplot()  # raises here, not after the comparisons, if figures cannot be drawn
    own_file = data is not None and isfile(data)
    comparisons, notes = _compare(chosen, None if own_file else data, as_json)
    if as_json:
        print_json(comparisons_json(comparisons))
    else:
        _print_comparisons(comparisons, worst)
    for note in notes:
        typer.echo(note, err=True)
    if output is not None:
        with usage_errors():
            print_written(*write_report(comparisons, output))
    if any(comparison.met is False for comparison in comparisons):
        raise typer.Exit(NO)


def _print_comparisons(comparisons: Sequence[Comparison], worst: int) -> None:
    """Print the tables of sets, and the rows with the largest errors."""
    width = _MIN_WIDTH + max(len(comparison.published.name) for comparison in comparisons)
    print_table(summary(comparisons), width)
    if (table := memory_summary(comparisons)) is not None:
        print_table(table, width)
    _print_rows(comparisons, worst)


def _selected_sets(
    names: Sequence[str], data: Path | None, by: Sequence[str]
) -> list[PublishedSet]:
    """Return the sets with these names, or all; those with a file in the folder, if one is given.

    Of a file, they are the sets of its rows.

    Raises:
        ValueError: there is no such set, no such folder, or no such column.
    """
    if data is not None and isfile(data):
        if names:
            raise ValueError(
                f"{names[0]!r}: names choose among the shipped sets, but all rows of the file"
                f" {data} are compared; leave the names out"
            )
        table = read_step_table(data)
        own = list(sets_of_rows(data, table.rows, by))
        for column in table.unread:
            typer.echo(f"{data}: column {column!r} is not read", err=True)
        for name in unknown_frameworks(table.rows):
            note = f"{data}: framework {name!r} is not known, and counts as Megatron-Core"
            typer.echo(note, err=True)
        return own
    if by:
        raise ValueError("--by divides the rows of a file; give one with --data")
    sets_by_name = {published.name: published for published in PUBLISHED_SETS}
    if unknown := [name for name in names if name not in sets_by_name]:
        raise ValueError(f"unknown set {unknown[0]!r}; expected some of {', '.join(sets_by_name)}")
    selected = [sets_by_name[name] for name in names or sets_by_name]
    if data is None:
        return selected
    files = dict.fromkeys(f"{name}.csv" for published in selected for name in published.files)
    if not isdir(data):
        raise ValueError(
            f"{data}: is neither a file nor a folder; expected a CSV file of steps, or a folder"
            f" with some of {', '.join(files)}"
        )
    with_files = [
        published
        for published in selected
        if any((data / f"{name}.csv").exists() for name in published.files)
    ]
    if not with_files:
        raise ValueError(f"{data}: no rows to compare; expected some of {', '.join(files)}")
    return with_files


def _compare(
    published_sets: Sequence[PublishedSet], data: Path | None, as_json: bool
) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons of sets, and notes on the sets that cannot be compared."""
    comparisons = []
    notes = []
    with progress_bar("validating", len(published_sets), as_json) as bar:
        for published in published_sets:
            bar.update(published.title)
            try:
                comparisons.append(Comparison.of(published, data))
            except NothingPredictedError as error:
                notes.append(str(error))
            except ValueError as error:
                raise typer.BadParameter(f"{published.name}: {error}") from error
            bar.advance()
    if not comparisons:
        raise typer.BadParameter("; ".join(notes))
    return comparisons, notes


def _print_rows(comparisons: Iterable[Comparison], worst: int) -> None:
    """Print the rows without a prediction, and the rows with the largest errors."""
    console = Console(highlight=False, soft_wrap=True)
    for comparison in comparisons:
        name = comparison.published.name
        for why in dict.fromkeys(row.why for row in comparison.unpredicted):
            rows = [row.name for row in comparison.unpredicted if row.why == why]
            console.print(f"{name}: {len(rows)} not predicted, {why}: {shortened(rows)}")
        unit = comparison.published.unit
        for case in sorted(comparison.cases, key=lambda case: -abs(case.error))[:worst]:
            console.print(
                f"{name}: {case.name}: {case.predicted:.4g} {unit},"
                f" measured {case.measured:.4g} ({case.error:+.1%})"
            )
