"""The application: every subcommand by its name."""

import typer

from autopar.command_line.compare_command import compare
from autopar.command_line.explain_command import explain
from autopar.command_line.hardware_commands import calibrate, clusters
from autopar.command_line.new_command import new
from autopar.command_line.plan_commands import diff, plan, predict, show
from autopar.command_line.report_command import report
from simulator.cli.error_lines import OneLineErrors, with_debug
from simulator.cli.hardware_file_commands import fit, schema
from simulator.cli.prediction_commands import llm, simulate
from simulator.cli.validate_command import validate

app = typer.Typer(
    name="autopar",
    cls=OneLineErrors,
    help="Plans, runs and predicts parallel training of JAX steps.",
)
app.callback()(with_debug)
for command in (
    *(new, plan, show, predict, diff, explain, compare, report),
    *(simulate, llm, validate),
    *(clusters, schema, calibrate, fit),
):
    app.command()(command)
