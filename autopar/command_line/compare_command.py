"""The subcommand `compare`: the plans of several methods and clusters side by side."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.command_line.named_methods import (
    MethodName,
    NoFitError,
    cluster_of_hosts,
    plan_with,
)
from autopar.command_line.plan_commands import ClusterNames, Hosts, MicroBatches
from autopar.command_line.usage import Json, StepPlace, print_json, print_table, usage_errors
from autopar.command_line.user_step import UserStep, load_step
from autopar.prediction.predicting import predict
from simulator.engine.prediction import Prediction
from simulator.files import one_line
from simulator.hardware.heterogeneous import AnyCluster
from simulator.report.prediction_table import prediction_rows, prediction_table

_DEFAULT = [MethodName.SHARD, MethodName.DATA, MethodName.ZERO2, MethodName.ZERO3]


def compare(
    step: StepPlace,
    cluster: ClusterNames,
    method: Annotated[
        list[MethodName] | None,
        typer.Option(help=f"Several to compare; by default {', '.join(_DEFAULT)}."),
    ] = None,
    hosts: Hosts = None,
    micro_batches: MicroBatches = None,
    as_json: Json = False,
) -> None:
    """Plan a step with several methods, and predict time and memory of each in a column.

    Predictions use the planner's model; `autopar predict --compiled` compiles a plan.
    """
    with usage_errors():
        clusters = {name: cluster_of_hosts(name, hosts) for name in cluster}
    methods = list(dict.fromkeys(method or _DEFAULT))
    user_step = load_step(step)
    predictions: dict[str, Prediction] = {}
    reasons: dict[str, str] = {}
    with (
        Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as progress,
        user_step.usage_errors(),
    ):
        task = progress.add_task("", total=len(clusters) * len(methods))
        for name, method_name, hardware in _pairs(clusters, methods):
            progress.update(task, description=name)
            try:
                predictions[name] = _predict(user_step, method_name, hardware, micro_batches)
            except NoFitError as error:
                reasons[name] = one_line(error)
            progress.advance(task)
    if not predictions:
        raise typer.BadParameter("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if as_json:
        errors = {name: {"error": reason} for name, reason in reasons.items()}
        print_json(prediction_rows(predictions) | errors)
        return
    print_table(prediction_table(predictions))
    for name, reason in reasons.items():
        typer.echo(f"{name}: no plan: {reason}")


def _pairs(
    clusters: dict[str, AnyCluster], methods: list[MethodName]
) -> Iterator[tuple[str, MethodName, AnyCluster]]:
    """Yield each method on each cluster, with the name of its column."""
    for cluster_name, cluster in clusters.items():
        for method in methods:
            name = f"{method}, {cluster_name}" if len(clusters) > 1 else str(method)
            yield name, method, cluster


def _predict(
    step: UserStep, method: MethodName, cluster: AnyCluster, micro_batches: int | None
) -> Prediction:
    plan = plan_with(method, step, cluster, micro_batches)
    return predict(
        step.fun, step.args, plan, cluster, fidelity="analytic", **step.prediction_options
    )
