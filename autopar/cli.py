"""The command line: look at plans and clusters."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.plan import Plan, PlanError
from simulator.cluster import Cluster, cluster_names

app = typer.Typer(help="Plans, runs and predicts parallel training of JAX steps.", no_args_is_help=True)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="A file that Plan.save wrote.", exists=True, dir_okay=False)],
) -> None:
    """Print a saved plan as a table."""
    try:
        Console().print(Plan.load(plan).table())
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def clusters() -> None:
    """List the clusters that come with the package."""
    table = Table("name", "devices", "description")
    for name in cluster_names():
        cluster = Cluster.load(name)
        table.add_row(name, f"{cluster.hosts} x {cluster.devices_per_host} {cluster.device.name}", cluster.description)
    Console().print(table)
