"""The application: every subcommand by its name."""

import typer

from autopar.command_line.compare_command import compare
from autopar.command_line.explain_command import explain
from autopar.command_line.hardware_commands import calibrate, clusters
from autopar.command_line.new_command import new
from autopar.command_line.plan_commands import diff, plan, predict, show
from simulator.cli import fit, llm, schema, simulate, validate

app = typer.Typer(
    help="Plans, runs and predicts parallel training of JAX steps.", no_args_is_help=True
)
for command in (
    *(new, plan, show, predict, diff, explain, compare),
    *(simulate, llm, validate),
    *(clusters, schema, calibrate, fit),
):
    app.command()(command)
