"""Subcommands that make, print, predict and compare plans: plan, show, predict, diff."""

from pathlib import Path
from typing import Annotated

import typer

from autopar.command_line.named_methods import MethodName, cluster_of_hosts, plan_with
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.usage import (
    MIN_WIDTH,
    ClusterName,
    ClusterNames,
    Compiled,
    Hosts,
    MicroBatches,
    PlanFile,
    StepPlace,
    load_plan,
    unique,
)
from autopar.command_line.user_step import UserStep, load_step
from autopar.plan import Plan
from autopar.prediction import predicting
from autopar.prediction.predicting import Fidelity
from autopar.progress import progress_part
from autopar.report import diff as report_diff
from autopar.tracing.shared_traces import shared_traces
from simulator.cli.common_options import Json, print_json, print_table, print_written
from simulator.cli.error_lines import NO, usage_errors
from simulator.cli.prediction_commands import print_predictions
from simulator.engine.prediction import Prediction
from simulator.files import check_writable
from simulator.hardware.heterogeneous import AnyCluster
from simulator.transformer.scenario_files import load_for_program


def plan(
    step: StepPlace,
    cluster: ClusterName,
    hosts: Hosts = None,
    method: Annotated[
        MethodName,
        typer.Option(
            help="auto: the step's own method, or the fastest pipeline or sharding on any mesh.",
        ),
    ] = MethodName.AUTO,
    micro_batches: MicroBatches = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan to write.")] = Path(
        "plan.json"
    ),
    as_json: Json = False,
) -> None:
    """Plan a step for a cluster, write the plan to a file and print it."""
    with usage_errors():
        check_writable(output)
        hardware = cluster_of_hosts(cluster, hosts)
    user_step = load_step(step)
    with (
        planning_progress(f"planning with {method}", as_json=as_json),
        user_step.usage_errors(),
    ):
        made = plan_with(method, user_step, hardware, micro_batches)
        made.save(output)
    _print_plan(made, as_json)
    print_written(output)


def show(plan: PlanFile, as_json: Json = False) -> None:
    """Print a saved plan as a table."""
    _print_plan(load_plan(plan), as_json)


def predict(
    plan: PlanFile,
    step: StepPlace,
    cluster: ClusterNames,
    compiled: Compiled = False,
    as_json: Json = False,
) -> None:
    """Predict the time and memory of a planned step on clusters, each in a column.

    A cluster that is smaller than the plan's is extended by whole hosts. The exit code is 1 if the
    step fits in the memory of none of the clusters.
    """
    loaded = load_plan(plan)
    with usage_errors():
        clusters = {name: cluster_of_plan(name, loaded) for name in unique(cluster)}
    user_step = load_step(step)
    fidelity: Fidelity = "compiled" if compiled else "analytic"
    predictions = {}
    with (
        planning_progress("predicting", as_json=as_json),
        user_step.usage_errors(),
        shared_traces(),
    ):
        for number, (name, hardware) in enumerate(clusters.items()):
            with progress_part(number / len(clusters), (number + 1) / len(clusters), name):
                predictions[name] = predict_step(user_step, loaded, hardware, fidelity)
    print_predictions(predictions, as_json, MIN_WIDTH)


def cluster_of_plan(name: str, plan: Plan) -> AnyCluster:
    """Return a cluster by its name or file, with enough hosts for a plan."""
    devices = 1 + max(device for stage in plan.stages for device in stage.devices)
    return load_for_program(name, devices)


def predict_step(step: UserStep, plan: Plan, cluster: AnyCluster, fidelity: Fidelity) -> Prediction:
    """Return the prediction of a planned step on a cluster."""
    return predicting.predict(
        step.fun, step.args, plan, cluster, fidelity=fidelity, **step.prediction_options
    )


def diff(
    first: PlanFile,
    second: PlanFile,
    as_json: Json = False,
) -> None:
    """Print the differences between two plans: shardings, settings, predicted time and memory.

    The exit code is 1 if there are differences.
    """
    difference = report_diff(load_plan(first), load_plan(second))
    if as_json:
        print_json({"lines": difference.lines})
    else:
        typer.echo(str(difference))
    if difference:
        raise typer.Exit(NO)


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        typer.echo(plan.to_json())
    else:
        print_table(plan.table(), MIN_WIDTH)
