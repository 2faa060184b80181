"""What subcommands share: arguments, usage errors, tables and JSON on stdout."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from autopar.plan import Plan
from simulator.cli import Json, usage_errors

PlanFile = Annotated[Path, typer.Argument(help="A file that `autopar plan` or Plan.save wrote.")]
StepPlace = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function that returns a step and its arguments, such as my_step:make_step or"
        " steps/my_step.py:make_step.",
    ),
]

__all__ = [
    "Json",
    "PlanFile",
    "StepPlace",
    "load_plan",
    "print_json",
    "print_table",
    "print_written",
    "usage_errors",
]

_MIN_WIDTH = 105


def load_plan(path: Path) -> Plan:
    """Return the plan in a file, or raise a usage error."""
    with usage_errors():
        return Plan.load(path)


def print_table(table: RenderableType) -> None:
    """Print a table, with room for its columns where stdout is not a terminal."""
    console = Console()
    console.width = max(console.width, _MIN_WIDTH)
    console.print(table)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def print_written(path: Path) -> None:
    """Name a file that was written, on stderr."""
    typer.echo(f"written: {path}", err=True)
