"""What subcommands about steps and plans share: arguments and options, and reading plans."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from autopar.plan import Plan
from simulator.cli.common_options import shipped_clusters
from simulator.cli.error_lines import usage_errors

PlanFile = Annotated[Path, typer.Argument(help="A file that `autopar plan` or Plan.save wrote.")]
StepPlace = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function that returns a step and its arguments, such as my_step:make_step or"
        " steps/my_step.py:make_step.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        metavar="NAME_OR_FILE",
        help="A shipped cluster, or a YAML file.",
        autocompletion=shipped_clusters,
    ),
]
ClusterNames = Annotated[
    list[str],
    typer.Option(
        metavar="NAME_OR_FILE",
        help="A shipped cluster, or a YAML file; several to compare.",
        autocompletion=shipped_clusters,
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled",
        help="Compile the step with XLA for the cluster, instead of using the planner's model.",
    ),
]
Hosts = Annotated[
    int | None, typer.Option(min=1, help="Number of hosts; by default that of the cluster.")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of microbatches; by default the fastest for auto and pipeline, else one.",
    ),
]

MIN_WIDTH = 105
"""Least width of tables, in characters, where stdout is not a terminal."""


def load_plan(path: Path) -> Plan:
    """Return the plan in a file, or raise a usage error."""
    with usage_errors():
        return Plan.load(path)


def unique(names: Iterable[str]) -> list[str]:
    """Return names in their order, each once."""
    return list(dict.fromkeys(names))
