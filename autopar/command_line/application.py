"""The application: every subcommand by its name."""

from importlib.metadata import version
from typing import Annotated

import typer

from autopar.command_line.compare_command import compare
from autopar.command_line.explain_command import explain
from autopar.command_line.fit_command import fit, savings
from autopar.command_line.hardware_commands import calibrate, clusters
from autopar.command_line.new_command import new
from autopar.command_line.plan_commands import diff, plan, predict, show
from autopar.command_line.report_command import report
from simulator.cli.error_lines import Debug, OneLineErrors
from simulator.cli.hardware_file_commands import fit_profiles, schema
from simulator.cli.llm_commands import llm
from simulator.cli.prediction_commands import simulate
from simulator.cli.validate_command import validate

app = typer.Typer(
    name="autopar",
    cls=OneLineErrors,
    help="Plans, runs and predicts parallel training of JAX steps.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"autopar {version('autopar')}, jax {version('jax')}")
        raise typer.Exit


@app.callback()
def options(
    shown_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of autopar and JAX.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Declare the options of all subcommands; `OneLineErrors` reads --debug."""


for command in (
    *(new, plan, show, predict, diff, explain, compare, report, fit, savings),
    *(simulate, validate),
    *(clusters, schema, calibrate, fit_profiles),
):
    app.command()(command)
app.add_typer(llm)
