"""The application of `python -m simulator`: the subcommands that need no JAX."""

import typer

from simulator.cli.error_lines import OneLineErrors, with_debug
from simulator.cli.hardware_file_commands import fit_profiles, schema
from simulator.cli.llm_commands import llm
from simulator.cli.prediction_commands import simulate
from simulator.cli.validate_command import validate

app = typer.Typer(
    name="python -m simulator",
    cls=OneLineErrors,
    add_completion=False,
    help="Predict training steps on clusters that need not exist on this machine.",
)
app.callback()(with_debug)
for command in (simulate, validate, schema, fit_profiles):
    app.command()(command)
app.add_typer(llm)
