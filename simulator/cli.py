"""The simulator's own command line: `python -m simulator`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from simulator.validation.published import published_sets
from simulator.validation.report import Comparison, as_json, summary, write_report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Predicts training steps on clusters that need not be here."
)


@app.callback()
def main() -> None:
    """Predicts training steps on clusters that need not be here."""


@app.command()
def validate(
    sets: Annotated[list[str] | None, typer.Argument(help="Names of published sets; all by default.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for tables and figures.")] = Path("results/validation"),
    write: Annotated[bool, typer.Option(help="Write tables and figures.")] = True,
    as_text: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of a table.")] = False,
    worst: Annotated[int, typer.Option(help="Also show so many rows of each set with the largest errors.")] = 0,
) -> None:
    """Compares predictions with published measurements: errors, rank correlation, and the cost of choosing plans by prediction."""
    known = {published.name: published for published in published_sets()}
    if unknown := [name for name in sets or [] if name not in known]:
        raise typer.BadParameter(f"unknown set {unknown[0]!r}; expected some of {', '.join(known)}")
    chosen = [known[name] for name in sets or known]
    console, errors = Console(), Console(stderr=True)
    console.width = max(console.width, 100)  # room for the table where nobody reads it on a terminal
    comparisons = []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=errors, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for published in chosen:
            progress.update(task, description=published.title)
            comparisons.append(Comparison.of(published))
            progress.advance(task)
    if as_text:
        typer.echo(json.dumps(as_json(comparisons), indent=1))
    else:
        console.print(summary(comparisons))
        for comparison in comparisons:
            _print_worst(console, comparison, worst)
    if write:
        paths = write_report(comparisons, output)
        errors.print(f"written: {', '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def _print_worst(console: Console, comparison: Comparison, count: int) -> None:
    for case in sorted(comparison.cases, key=lambda case: -abs(case.error))[:count]:
        unit = comparison.published.unit
        console.print(
            f"{comparison.published.name}: {case.name}: {case.predicted:.4g} {unit}, measured {case.measured:.4g} ({case.error:+.1%})",
            highlight=False,
        )
