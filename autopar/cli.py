"""The command line: print plans and clusters, calibrate the cost model for this machine."""

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
    """Measure the devices of this machine and write a cluster file for `cluster=`."""
    if output.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(
            f"{output}: expected a path that ends in .yaml, as cluster files do"
        )
    try:
        check_writable(output)
    except FileError as error:
        raise typer.BadParameter(str(error)) from None
    # imports JAX, which the other commands do without
    from autopar.calibrate import calibrate
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
    """Return a table of the measurements behind a cluster file, and of the errors of the fit."""
    table = Table("measured", "rows", "error", "held out")
    provenance = cluster.provenance
    if provenance is not None:
        for measurement, rows in provenance.rows.items():
            errors = (
                provenance.fitted_error.get(measurement),
                provenance.held_out_error.get(measurement),
            )
            texts = ("" if error is None else f"{error:.1%}" for error in errors)
            table.add_row(measurement, str(rows), *texts)
    return table
