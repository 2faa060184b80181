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
from simulator.hardware import collective_profile, kernel_profile
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
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The profile to write, .yaml, by default the table's name. Without a table, the "
            "folder of the profiles.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit the curves of collectives to a table of measurements.

    A fifth of the rows is not fitted to; the errors are those on that fifth. Without a table, fit
    the shipped profiles of GPUs and links again to the measurements shipped with them, and write
    them to the folder --output.
    """
    if measurements is None:
        if output is None:
            raise typer.BadParameter(
                "give a table of measurements, or --output FOLDER for the shipped profiles, fitted "
                "again to the shipped measurements"
            )
        _fit_shipped_profiles(output, as_json)
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


def _fit_shipped_profiles(folder: Path, as_json: bool) -> None:
    """Fit the shipped profiles again, and write them to `kernels` and `collectives` of a folder."""
    try:
        for part in (kernel_profile.PROFILES, collective_profile.PROFILES):
            (folder / part.name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--output: {folder} can't be made: {error.strerror}") from error
    paths = []
    for path, profile in shipped_profiles.fit_profiles():
        written = folder / path.parent.name / path.name
        write_profile(written, profile)
        paths.append(str(written))
        if not as_json:
            typer.echo(paths[-1])
    if as_json:
        print_json(paths)
