"""The command line: look at plans and clusters."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autopar.plan import Plan, PlanError
from simulator.cluster import cluster_names, mixed_cluster_names
from simulator.mixed import load_cluster

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
    for name in cluster_names() + mixed_cluster_names():
        cluster = load_cluster(name)
        pools = [f"{pool.hosts} x {pool.devices_per_host} {pool.device.name}" for pool in cluster.pools]
        table.add_row(name, " + ".join(pools), cluster.description)
    Console().print(table)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(help="The cluster file to write, .yaml.", dir_okay=False)],
) -> None:
    """Measure the devices of this machine, in a few minutes, and write them as a cluster file for `cluster=`."""
    if output.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(f"{output}: expected a path that ends in .yaml, as cluster files do")
    from autopar.calibrate import calibrate  # starts JAX, which the other commands do without
    from simulator.calibration.profiles import write_profile

    with Console(stderr=True).status("calibrating") as status:
        cluster = calibrate(progress=lambda what: status.update(f"calibrating: {what}"))
    write_profile(output, cluster)
    typer.echo(f"{output}: {cluster.description}; {cluster.source}")
