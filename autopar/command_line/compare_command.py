"""The subcommand `compare`: the plans of several methods and clusters side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from autopar.command_line.named_methods import (
    MethodName,
    NoFitError,
    cluster_of_hosts,
    plan_with,
)
from autopar.command_line.plan_commands import predict_step
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.usage import (
    MIN_WIDTH,
    ClusterNames,
    Hosts,
    MicroBatches,
    StepPlace,
    unique,
)
from autopar.command_line.user_step import UserStep, load_step
from autopar.prediction.predicting import Fidelity
from autopar.progress import progress_part
from autopar.tracing.shared_traces import shared_traces
from simulator.cli.common_options import Json, print_json, print_table
from simulator.cli.error_lines import NegativeAnswer, usage_errors
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

    Predictions use the planner's model; `autopar predict --compiled` compiles a plan. The exit code
    is 1 if no method has a plan.
    """
    with usage_errors():
        clusters = {name: cluster_of_hosts(name, hosts) for name in unique(cluster)}
    methods = [MethodName(name) for name in unique(method or _DEFAULT)]
    user_step = load_step(step)
    predictions, reasons = compare_methods(
        user_step, clusters, methods, micro_batches, as_json=as_json
    )
    if not predictions:
        raise NegativeAnswer("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if as_json:
        errors = {name: {"error": reason} for name, reason in reasons.items()}
        print_json(prediction_rows(predictions) | errors)
        return
    print_table(prediction_table(predictions), MIN_WIDTH)
    for name, reason in reasons.items():
        typer.echo(f"{name}: no plan: {reason}")


def compare_methods(
    step: UserStep,
    clusters: Mapping[str, AnyCluster],
    methods: Sequence[MethodName],
    micro_batches: int | None,
    fidelity: Fidelity = "analytic",
    as_json: bool = False,
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Plan a step with several methods on several clusters, with progress on stderr.

    Args:
        step: the step.
        clusters: the clusters by name.
        methods: the methods.
        micro_batches: number of microbatches, as in `plan_with`.
        fidelity: the source of the programs that are predicted.
        as_json: whether the subcommand prints JSON.

    Returns:
        The predictions of the plans, and the reasons why other methods have no plan. Keys name the
        method and, if there are several, the cluster.
    """
    predictions: dict[str, Prediction] = {}
    reasons: dict[str, str] = {}
    with (
        planning_progress("comparing", as_json),
        step.usage_errors(),
        shared_traces(),
    ):
        count = len(clusters) * len(methods)
        for number, (name, method, cluster) in enumerate(_pairs(clusters, methods)):
            try:
                with progress_part(number / count, (number + 1) / count, name):
                    predictions[name] = _predicted(step, method, cluster, micro_batches, fidelity)
            except NoFitError as error:
                reasons[name] = one_line(error)
    return predictions, reasons


def _predicted(
    step: UserStep,
    method: MethodName,
    cluster: AnyCluster,
    micro_batches: int | None,
    fidelity: Fidelity,
) -> Prediction:
    """Return the prediction of a step, planned with a method."""
    with progress_part(0, 0.6):
        plan = plan_with(method, step, cluster, micro_batches)
    with progress_part(0.6, 1):
        return predict_step(step, plan, cluster, fidelity)


def _pairs(
    clusters: Mapping[str, AnyCluster], methods: Sequence[MethodName]
) -> Iterator[tuple[str, MethodName, AnyCluster]]:
    """Yield each method on each cluster, with the name of its column."""
    for cluster_name, cluster in clusters.items():
        for method in methods:
            name = f"{method}, {cluster_name}" if len(clusters) > 1 else str(method)
            yield name, method, cluster
