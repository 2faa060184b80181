"""The command line: `python -m experiments.reach`."""

import csv
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from experiments.reach.public_models import model_names
from experiments.reach.reach_cells import ReachCell
from experiments.reach.reach_methods import METHODS
from experiments.reach.reach_pool import run_cells

TABLE = Path(__file__).parents[2] / "results" / "tables" / "reach.csv"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    models: Annotated[
        str, typer.Option(help="Patterns of models, e.g. 'transformers/*,*/gpt2'.")
    ] = "*",
    methods: Annotated[str, typer.Option(help="Patterns of methods, e.g. 'shard*,1f1b_2'.")] = "*",
    processes: Annotated[int, typer.Option("-j", help="Worker processes at a time.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for a cell.", min=1)] = 300.0,
    again: Annotated[
        str, typer.Option(help="Outcomes to run again: equal,refused,wrong,failed or all.")
    ] = "",
    output: Annotated[Path, typer.Option(help="The table, which is extended.")] = TABLE,
) -> None:
    """Run public models by every method, and write a row for each into a table.

    Cells that the table has already are left out, so that a run may be continued.
    """
    rows = read_table(output)
    repeated = set(again.split(","))
    selected = _matching(methods, METHODS, "--methods")
    wanted: dict[str, list[str]] = {}
    for model in _matching(models, _models(), "--models"):
        for method in selected:
            row = rows.get((model, method))
            if row is None or repeated & {"all", row["outcome"]}:
                wanted.setdefault(model, []).append(method)
    total, start = sum(map(len, wanted.values())), time.perf_counter()
    for number, cell in enumerate(run_cells(wanted, processes, timeout), 1):
        rows[cell.model, cell.method] = {
            name: "" if value is None else str(value) for name, value in asdict(cell).items()
        }
        write_table(output, rows)
        seconds = time.perf_counter() - start
        typer.echo(f"{number}/{total} {seconds:6.0f} s  {progress_line(cell)}")
    typer.echo(
        ", ".join(f"{n} {o}" for o, n in Counter(r["outcome"] for r in rows.values()).items())
    )


def progress_line(cell: ReachCell) -> str:
    """Return a line that says what became of a cell."""
    parts = [f"{cell.model:<32} {cell.method:<24} {cell.outcome}"]
    return ": ".join([*parts, *([cell.reason[:200]] if cell.reason else [])])


def read_table(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of a table by model and method; none if there is no such file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["model"], row["method"]): row for row in csv.DictReader(file)}


def write_table(path: Path, rows: dict[tuple[str, str], dict[str, str]]) -> None:
    """Write the rows of a table in the order of models and methods; replace the file at once."""
    order = {name: number for number, name in enumerate(METHODS)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [each.name for each in fields(ReachCell)], lineterminator="\n"
        )
        writer.writeheader()
        for _, row in sorted(rows.items(), key=lambda item: (item[0][0], order[item[0][1]])):
            writer.writerow(row)
    os.replace(temporary, path)


def _models() -> list[str]:
    """Return the names of all models.

    Raises:
        typer.BadParameter: a library is not installed.
    """
    try:
        return model_names()
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"{error.name} is not installed; run it by `uv run --group reach`"
        ) from error


def _matching(patterns: str, names: Iterable[str], option: str) -> list[str]:
    """Return the names that match one of several patterns, in order."""
    names = list(names)
    matching = [n for n in names if any(fnmatch(n, p) for p in patterns.split(","))]
    if not matching:
        raise typer.BadParameter(
            f"{patterns!r} matches none of {', '.join(names)}", param_hint=option
        )
    return matching


if __name__ == "__main__":
    app()
