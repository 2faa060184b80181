"""Subcommands about hardware: the list of clusters, and the calibration of this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from autopar.command_line.usage import MIN_WIDTH
from simulator.cli.common_options import Json, print_json, print_table, print_written
from simulator.cli.error_lines import usage_errors
from simulator.cli.progress_bars import progress_bar
from simulator.files import check_writable
from simulator.hardware.cluster import Cluster
from simulator.hardware.cluster_paths import cluster_names, heterogeneous_cluster_names
from simulator.hardware.heterogeneous import load_cluster


def clusters(as_json: Json = False) -> None:
    """List the clusters that come with the package."""
    rows = [
        {
            "name": name,
            "devices": " + ".join(
                f"{pool.hosts} x {pool.devices_per_host} {pool.device.name}"
                for pool in cluster.pools
            ),
            "description": cluster.description,
        }
        for name in cluster_names() + heterogeneous_cluster_names()
        for cluster in (load_cluster(name),)
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    print_table(table, MIN_WIDTH)


def calibrate(
    output: Annotated[Path, typer.Argument(help="The cluster file to write, .yaml.")],
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds in which to measure.")] = 240.0,
    as_json: Json = False,
) -> None:
    """Measure the devices of this machine and write a cluster file for `cluster=`."""
    if output.suffix not in (".yaml", ".yml"):
        raise typer.BadParameter(
            f"{output}: expected a path that ends in .yaml, as cluster files do"
        )
    with usage_errors():
        check_writable(output)
    # imported late because it runs programs, and the other commands start faster without it
    from autopar.calibrate import calibrate
    from simulator.calibration.shipped_profiles import write_profile

    with progress_bar("calibrating", total=1.0, as_json=as_json) as bar:
        cluster = calibrate(
            progress=lambda what, spent: bar.update(what, completed=spent), budget=budget
        )
    with usage_errors():
        write_profile(output, cluster)
    print_written(output)
    if as_json:
        print_json(cluster.model_dump(mode="json"))
        return
    print_table(_errors_table(cluster), MIN_WIDTH)
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
