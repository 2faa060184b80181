"""The command line: look at plans and clusters."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from autopar.plan import Plan, PlanError
from simulator.files import FileError, check_writable
from simulator.hardware.cluster import Cluster, cluster_names, heterogeneous_cluster_names
from simulator.hardware.heterogeneous import load_cluster

app = typer.Typer(
    help="Plans, runs and predicts parallel training of JAX steps.", no_args_is_help=True
)


@app.command()
def show(
    plan: Annotated[
        Path, typer.Argument(help="A file that Plan.save wrote.", exists=True, dir_okay=False)
    ],
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
    for name in cluster_names() + heterogeneous_cluster_names():
        cluster = load_cluster(name)
        pools = [
            f"{pool.hosts} x {pool.devices_per_host} {pool.device.name}" for pool in cluster.pools
        ]
        table.add_row(name, " + ".join(pools), cluster.description)
    Console().print(table)


@app.command()
def calibrate(
    output: Annotated[
        Path, typer.Argument(help="The cluster file to write, .yaml.", dir_okay=False)
    ],
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds in which to measure.")] = 240.0,
) -> None:
    """Measure the devices of this machine, in a few minutes, and write them as a cluster file for `cluster=`."""
    if output.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(
            f"{output}: expected a path that ends in .yaml, as cluster files do"
        )
    try:
        check_writable(output)
    except FileError as error:
        raise typer.BadParameter(str(error)) from None
    from autopar.calibrate import calibrate  # starts JAX, which the other commands do without
    from simulator.calibration.shipped_profiles import write_profile

    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("calibrating", total=1.0)
        cluster = calibrate(
            progress=lambda what, spent: bar.update(task, completed=spent, description=what),
            budget=budget,
        )
    write_profile(output, cluster)
    Console().print(_errors_table(cluster))
    typer.echo(f"{output}: {cluster.description}; {cluster.source}")


def _errors_table(cluster: Cluster) -> Table:
    """What was measured of a cluster, and how well its description fits."""
    table = Table("measured", "rows", "error", "held out")
    if (found := cluster.provenance) is not None:
        for what, rows in found.rows.items():
            errors = (of.get(what) for of in (found.fitted_error, found.held_out_error))
            table.add_row(
                what, str(rows), *("" if error is None else f"{error:.1%}" for error in errors)
            )
    return table
