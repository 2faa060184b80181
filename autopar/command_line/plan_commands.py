"""Subcommands that make, print, predict and compare plans: plan, show, predict, diff."""

from pathlib import Path
from typing import Annotated

import typer

from autopar.command_line.named_methods import MethodName, cluster_of_hosts, plan_with
from autopar.command_line.usage import (
    Json,
    PlanFile,
    StepPlace,
    load_plan,
    print_json,
    print_table,
    print_written,
    usage_errors,
)
from autopar.command_line.user_step import UserStep, load_step
from autopar.plan import Plan
from autopar.prediction import predicting
from autopar.prediction.predicting import Fidelity
from autopar.report import diff as report_diff
from simulator.engine.prediction import Prediction
from simulator.files import check_writable
from simulator.report.prediction_table import prediction_json, prediction_table
from simulator.transformer.scenario_files import load_for_program

ClusterName = Annotated[
    str, typer.Option(metavar="NAME_OR_FILE", help="A shipped cluster, or a YAML file.")
]
ClusterNames = Annotated[
    list[str],
    typer.Option(
        metavar="NAME_OR_FILE", help="A shipped cluster, or a YAML file; several to compare."
    ),
]
Hosts = Annotated[
    int | None, typer.Option(min=1, help="Number of hosts; by default that of the cluster.")
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of microbatches; by default one, and the fastest for pipelines."
    ),
]


def plan(
    step: StepPlace,
    cluster: ClusterName,
    hosts: Hosts = None,
    method: Annotated[
        MethodName,
        typer.Option(
            help="auto: the step's own method, or the faster of shard and pipeline.",
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
    with user_step.usage_errors():
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
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Compile the step with XLA for the cluster, instead of using the planner's model.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the time and memory of a planned step on clusters, each in a column.

    A cluster that is smaller than the plan's is extended by whole hosts.
    """
    loaded = load_plan(plan)
    user_step = load_step(step)
    fidelity: Fidelity = "compiled" if compiled else "analytic"
    with user_step.usage_errors():
        predictions = {
            name: predict_step(user_step, loaded, name, fidelity) for name in dict.fromkeys(cluster)
        }
    if as_json:
        typer.echo(prediction_json(predictions))
    else:
        print_table(prediction_table(predictions))


def predict_step(step: UserStep, plan: Plan, cluster: str, fidelity: Fidelity) -> Prediction:
    """Return the prediction of a planned step on a cluster with enough hosts for the plan."""
    devices = 1 + max(device for stage in plan.stages for device in stage.devices)
    return predicting.predict(
        step.fun,
        step.args,
        plan,
        load_for_program(cluster, devices),
        fidelity=fidelity,
        **step.prediction_options,
    )


def diff(
    first: PlanFile,
    second: PlanFile,
    as_json: Json = False,
) -> None:
    """Print the differences between two plans: shardings, settings, predicted time and memory."""
    difference = report_diff(load_plan(first), load_plan(second))
    if as_json:
        print_json({"lines": difference.lines})
    else:
        typer.echo(str(difference))


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        typer.echo(plan.to_json())
    else:
        print_table(plan.table())
