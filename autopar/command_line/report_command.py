"""The subcommand `report`: plans and their predictions as a page for a browser."""

from collections.abc import Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from autopar.command_line.compare_command import compare_methods
from autopar.command_line.named_methods import MethodName
from autopar.command_line.plan_commands import cluster_of_plan
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.usage import Compiled, load_plan, unique
from autopar.command_line.user_step import UserStep, load_step
from autopar.plan import Plan
from autopar.planning.last_results import OptionTrial, get_last_search_result
from autopar.prediction.predicting import Fidelity
from autopar.report import Alternative, PlanReport, plan_report, save_report
from autopar.tracing.shared_traces import shared_traces
from simulator.cli.common_options import Clusters, print_written, shipped_clusters
from simulator.cli.error_lines import usage_errors
from simulator.files import check_writable
from simulator.hardware.heterogeneous import AnyCluster

_WHOLE_STEP = (MethodName.SHARD, MethodName.DATA, MethodName.ZERO2, MethodName.ZERO3)


def report(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN... [MODULE:FUNCTION]",
            help="Files that `autopar plan` or Plan.save wrote; and last, for predictions, the"
            " function that returns their step, such as my_step:make_step.",
        ),
    ],
    cluster: Clusters = None,
    compiled: Compiled = False,
    alternatives: Annotated[
        bool,
        typer.Option(
            "--alternatives", help="Also plan the step with the other methods, to compare."
        ),
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a page about plans: decisions, time, timeline, memory, collectives, alternatives.

    The page is one file, and needs no network. Several plans are shown side by side.
    Predictions are for the clusters given, or for the cluster of each plan.
    """
    files, place = _split(plans)
    if place is None and (cluster or compiled or alternatives):
        given = "--cluster" if cluster else "--compiled" if compiled else "--alternatives"
        raise typer.BadParameter(
            f"{given} is about predictions, which need the step; give it after the plans, as"
            " MODULE:FUNCTION"
        )
    if any(output.resolve() == Path(file).resolve() for file in files):
        raise typer.BadParameter(f"{output} is one of the plans; choose another output")
    with usage_errors():
        check_writable(output)
    loaded = {file: load_plan(Path(file)) for file in files}
    if place is None:
        reports = [PlanReport(file, plan) for file, plan in loaded.items()]
        others: list[Alternative] = []
    else:
        fidelity: Fidelity = "compiled" if compiled else "analytic"
        with usage_errors():
            hardware = {file: _clusters(file, plan, cluster) for file, plan in loaded.items()}
        step = load_step(place)
        with shared_traces():
            reports = list(_predicted(step, loaded, hardware, fidelity))
            others = list(_alternatives(step, reports[0], fidelity)) if alternatives else []
    with usage_errors():
        options = [option for name in cluster or () for option in ("--cluster", name)]
        options += ["--compiled"] * compiled + ["--alternatives"] * alternatives
        command = join(["autopar", "report", *plans, *options, "-o", str(output)])
        save_report(output, reports, others, command=command)
    print_written(output)


def _split(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the plan files, without repetitions, and the step if the last argument is one."""
    files, last = list(arguments[:-1]), arguments[-1]
    if ":" in last and not isfile(last):
        if not files:
            raise typer.BadParameter(f"{last} is a step; give a plan of it first, a file")
        return unique(files), last
    return unique(arguments), None


def _clusters(file: str, plan: Plan, names: Sequence[str] | None) -> dict[str, AnyCluster]:
    """Return the clusters of a plan's predictions by name; by default its own."""
    if not names and plan.cluster not in shipped_clusters():
        raise ValueError(
            f"{file} is for cluster {plan.cluster!r}, which is not a shipped one; give its file"
            " with --cluster"
        )
    return {name: cluster_of_plan(name, plan) for name in unique(names or [plan.cluster])}


def _predicted(
    step: UserStep,
    plans: Mapping[str, Plan],
    clusters: Mapping[str, Mapping[str, AnyCluster]],
    fidelity: Fidelity,
) -> Iterator[PlanReport]:
    """Yield the prediction of each plan on each of its clusters."""
    for file, plan in plans.items():
        for name, cluster in clusters[file].items():
            heading = f"{file} on {name}" if len(clusters[file]) > 1 else file
            options = step.prediction_options
            with planning_progress(f"predicting {heading}"), step.usage_errors():
                report = plan_report(
                    heading, plan, step.fun, step.args, cluster, fidelity=fidelity, **options
                )
            yield report


def _alternatives(step: UserStep, report: PlanReport, fidelity: Fidelity) -> Iterator[Alternative]:
    """Yield the plans of the other methods on the cluster of a report, and of searches in them."""
    plan, cluster = report.plan, report.cluster
    assert plan is not None
    assert cluster is not None, "the report has a prediction"
    for methods, micro_batches in (
        (_WHOLE_STEP, plan.num_micro_batches),
        ([MethodName.PIPELINE], None),
    ):
        predictions, reasons = compare_methods(
            step, {cluster.name: cluster}, methods, micro_batches, fidelity
        )
        for name, prediction in predictions.items():
            remark = f"{fidelity} prediction on {prediction.devices} devices"
            if micro_batches is not None:
                remark += f" with {micro_batches} microbatch(es)"
            yield Alternative(name, prediction.seconds, prediction.memory.total, remark)
        for name, reason in reasons.items():
            yield Alternative(name, None, None, f"no plan: {reason}")
    for trial in get_last_search_result():
        yield _searched(trial)


def _searched(trial: OptionTrial) -> Alternative:
    """Return a combination of options that the search of pipelines tried."""
    remark = f"no plan: {trial.reason}" if trial.reason else "planner's estimate, in its search"
    return Alternative(trial.options, trial.seconds, trial.num_bytes, remark)
