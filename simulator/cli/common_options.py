"""What subcommands share: options and their completion, tables and JSON on stdout."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from simulator.hardware.cluster_paths import cluster_names, heterogeneous_cluster_names


def shipped_clusters() -> list[str]:
    """Return the names that a shell completes after `--cluster`."""
    return [*cluster_names(), *heterogeneous_cluster_names()]


Clusters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME_OR_FILE",
        help="A shipped cluster or a YAML file; several to compare.",
        autocompletion=shipped_clusters,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_table(table: RenderableType, least_width: int) -> None:
    """Print a table, with room for its columns where stdout is not a terminal."""
    console = Console()
    console.width = max(console.width, least_width)
    console.print(table)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def print_written(*paths: Path) -> None:
    """Name files that were written, on stderr."""
    typer.echo(f"written: {', '.join(map(str, paths))}", err=True)
