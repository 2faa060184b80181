"""The simulator's own command line: `python -m simulator`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from simulator.calibration.profiles import fit_profiles, write_profile
from simulator.formula import predict
from simulator.formula.files import BACKENDS, Formula, load_machine
from simulator.formula.what_if import Change
from simulator.prediction import PARTS, Prediction
from simulator.validation.published import published_sets
from simulator.validation.report import Comparison, as_json, summary, write_report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Predicts training steps on clusters that need not be here."
)


@app.callback()
def main() -> None:
    """Predicts training steps on clusters that need not be here."""


@app.command("predict")
def predict_formula(
    formula: Annotated[Path, typer.Argument(help="YAML with the sections `model` and `execution`.", exists=True)],
    cluster: Annotated[
        list[str] | None, typer.Option(help="A shipped cluster or a YAML file; several to compare.")
    ] = None,
    backend: Annotated[str, typer.Option(help=f"The software: {', '.join(BACKENDS)}.")] = "eager",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "--what-if",
            help="section.field=value of model, execution or cluster; or a factor, e.g. cluster.inter_host.bandwidth_gb_per_s=2x.",
        ),
    ] = None,
    as_text: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predicts a training step of a transformer that is described by its sizes: time, where it goes, and memory."""
    try:
        changes = [Change.parse(text) for text in change or []]
        of_cluster = [each for each in changes if each.path[0] == "cluster"]
        described = Formula.load(formula, [each for each in changes if each.path[0] != "cluster"])
        predictions = {}
        for name in cluster or ["dgx_a100_80"]:
            machine = load_machine(name, described.execution.devices, backend, of_cluster)
            predictions[name] = predict(described.model, described.execution, machine)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_text:
        typer.echo(json.dumps({name: prediction.row() for name, prediction in predictions.items()}, indent=1))
    else:
        console = Console()
        console.width = max(console.width, 80)
        console.print(_prediction_table(predictions))


def _prediction_table(predictions: dict[str, Prediction]) -> Table:
    """A column per cluster."""
    table = Table("", *predictions, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    several = list(predictions.values())

    def row(label: str, cell: Callable[[Prediction], str]) -> None:
        table.add_row(label, *map(cell, several))

    row("step, s", lambda one: f"{one.seconds:.4g}")
    row("  P10 to P90", lambda one: f"{one.quantile(0.1):.4g} to {one.quantile(0.9):.4g}")
    for part in PARTS:
        if any(getattr(one, part) for one in several):
            row(f"  {part}", lambda one, part=part: f"{getattr(one, part):.4g}")
    for axis in several[0].exposed:
        row(
            f"  {axis}, exposed (of)", lambda one, axis=axis: f"{one.exposed[axis]:.4g} ({one.communication[axis]:.4g})"
        )
    row("memory, GB", lambda one: f"{one.memory.total / 1e9:.1f}")
    for part in several[0].memory.parts:
        row(f"  {part}", lambda one, part=part: f"{one.memory.parts[part] / 1e9:.1f}")
    row(
        "  fits, with reserve",
        lambda one: (
            f"{'yes' if one.memory.fits else 'no'}, {one.memory.reserved / 1e9:.1f} of {one.memory.capacity / 1e9:.0f}"
        ),
    )
    row("tokens per s", lambda one: f"{one.tokens_per_s:,.0f}")
    row("TFLOP/s a device", lambda one: f"{one.tflop_per_s_per_device:.1f}")
    row("MFU, HFU", lambda one: f"{one.mfu:.1%}, {one.hfu:.1%}")
    return table


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


@app.command()
def fit() -> None:
    """Fits the shipped profiles of GPUs and their links anew to the measurements that come with them, and writes them in place."""
    console = Console()
    for path, profile in fit_profiles():
        write_profile(path, profile)
        console.print(f"{path.parent.name}/{path.name}", highlight=False)
