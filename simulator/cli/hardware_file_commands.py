"""Subcommands about files that describe hardware: their schemas, and curves of collectives."""

from pathlib import Path
from typing import Annotated

import typer

from simulator.calibration import shipped_profiles
from simulator.calibration.fit_profiles import COLUMNS, fit_collective_profile
from simulator.calibration.shipped_profiles import write_profile
from simulator.cli.common_options import Json, print_json, print_written
from simulator.cli.error_lines import usage_errors
from simulator.files import check_writable, read_table
from simulator.hardware.schema import SCHEMAS


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            help=f"Of a file that describes: {', '.join(SCHEMAS)}.",
            autocompletion=lambda: list(SCHEMAS),
        ),
    ] = "cluster",
) -> None:
    """Print the JSON schema of files that describe hardware, for editors and checkers."""
    if kind not in SCHEMAS:
        raise typer.BadParameter(
            f"unknown kind of file {kind!r}; expected one of {', '.join(SCHEMAS)}"
        )
    print_json(SCHEMAS[kind]())


def fit_profiles(
    measurements: Annotated[
        Path | None,
        typer.Argument(
            help=f"Collectives measured on one kind of device, .csv: {', '.join(COLUMNS)}."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The profile to write, .yaml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the curves of collectives to a table of measurements.

    A fifth of the rows is not fitted to; the errors are those on that fifth. Without a table, fit
    the shipped profiles of GPUs and links again, in place, to the measurements shipped with them.
    """
    if measurements is None:
        if output is not None:
            raise typer.BadParameter(
                "--output is for a table of measurements; the shipped profiles are written in place"
            )
        _fit_shipped_profiles(as_json)
        return
    if not measurements.name:  # "" and "/"
        raise typer.BadParameter(f"{measurements}: is a folder; expected a .csv file")
    output = output or measurements.with_suffix(".yaml")
    with usage_errors():
        check_writable(output)
        table = read_table(measurements)
    try:
        profile, errors = fit_collective_profile(table, f"fitted to {measurements.name}")
        write_profile(output, profile)
    except ValueError as error:
        raise typer.BadParameter(f"{measurements}: {error}") from error
    if as_json:
        typer.echo(errors.to_json(orient="records", indent=1))
    else:
        typer.echo(errors.to_string(index=False, float_format="{:.1%}".format))
    print_written(output)


def _fit_shipped_profiles(as_json: bool) -> None:
    paths = []
    for path, profile in shipped_profiles.fit_profiles():
        write_profile(path, profile)
        paths.append(f"{path.parent.name}/{path.name}")
        if not as_json:
            typer.echo(paths[-1])
    if as_json:
        print_json(paths)
