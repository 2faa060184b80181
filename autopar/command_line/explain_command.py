"""The subcommand `explain`: why a value has its sharding."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import isnan
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from autopar.analysis.descriptions import nearest
from autopar.command_line.planning_progress import planning_progress
from autopar.command_line.usage import MIN_WIDTH, PlanFile, StepPlace, load_plan
from autopar.command_line.user_step import load_step
from autopar.lowering.planned import stage_plan
from autopar.plan import Plan
from autopar.planning.plan_step import planned_step
from autopar.progress import progress_part
from autopar.report import PlannedStep, decisions
from autopar.report.decisions import costs_on
from simulator.cli.common_options import Json, print_json, print_table, shipped_clusters
from simulator.cli.error_lines import usage_errors
from simulator.hardware.cluster_paths import cluster_names, heterogeneous_cluster_names
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster
from simulator.transformer.scenario_files import load_for_program

_SECONDS = ("compute_seconds", "communication_seconds", "resharding_seconds")


def explain(
    plan: PlanFile,
    step: StepPlace,
    path: Annotated[
        str,
        typer.Argument(
            help="An input such as 0/params/w, a part of the model, or an equation such as #12; *"
            " matches any text."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_FILE",
            help="The cluster that the plan was made for; needed if it is not a shipped one.",
            autocompletion=shipped_clusters,
        ),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="A stage of a pipeline; all by default.")
    ] = None,
    runners_up: Annotated[
        int, typer.Option(min=0, help="Maximum number of other candidates to print.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Explain why a value has its sharding: its costs, and the candidates that cost more."""
    loaded = load_plan(plan)
    stages = range(len(loaded.stages)) if stage is None else (stage,)
    with usage_errors():
        hardware = _hardware(loaded, cluster)
    user_step = load_step(step)
    rows: list[dict[str, Any]] = []
    with (
        planning_progress("explaining", as_json),
        user_step.usage_errors(),
    ):
        with progress_part(0, 0.5):
            planned = planned_step(user_step.fun, user_step.args, loaded, **user_step.batch_options)
        for count, number in enumerate(stages, 1):
            with progress_part(0.5, 0.5 + 0.5 * count / len(stages), f"stage {number}"):
                rows += _rows(planned, number, hardware, runners_up)
    selected = [row for row in rows if _matches(row, path)]
    if not selected:
        names = list(dict.fromkeys(row["name"] for row in rows))
        raise typer.BadParameter(
            f"{path!r}: the step has no such value; expected an input, a part of the model or an"
            f" equation, such as {nearest(path, names)}"
        )
    if as_json:
        print_json(selected)
    else:
        print_table(Group(*map(_explanation, selected)), MIN_WIDTH)


def _hardware(plan: Plan, cluster: str | None) -> AnyCluster | None:
    """Return the cluster to explain a plan with.

    Args:
        plan: the plan.
        cluster: the name or file of the cluster that the plan was made for, if it was given.

    Returns:
        `cluster`, or its pool that the plan was made for. None if it was not given and the plan
        names a shipped cluster: `decisions` then uses the costs of that one.

    Raises:
        ValueError: no cluster was given, and the plan names none of the shipped ones; or the plan
            was made for another cluster.
    """
    if cluster is None:
        if plan.cluster in cluster_names() + heterogeneous_cluster_names():
            return None
        raise ValueError(
            f"the plan is for cluster {plan.cluster!r}, which is not a shipped one; give its file"
            " with --cluster"
        )
    devices = [device for stage in plan.stages for device in stage.devices]
    hardware = load_for_program(cluster, 1 + max(devices))
    pools = hardware.pools if isinstance(hardware, HeterogeneousCluster) else ()
    for candidate in (hardware, *pools):
        if candidate.name == plan.cluster:
            return candidate
    raise ValueError(
        f"the plan is for cluster {plan.cluster!r}, but --cluster is {hardware.name!r}; give the"
        " cluster that the plan was made for"
    )


def _rows(
    planned: PlannedStep, stage: int, hardware: AnyCluster | None, runners_up: int
) -> Iterator[dict[str, Any]]:
    """Yield the decisions of a stage as JSON values."""
    costs = None if hardware is None else costs_on(hardware, stage_plan(planned.plan, stage))
    table = decisions(planned, stage=stage, costs=costs, runners_up=runners_up)
    for row in table.astype(object).to_dict("records"):
        others = [
            {"choice": other.choice, "extra_seconds": other.extra_seconds}
            for other in row["runners_up"]
        ]
        costs_of_row = {name: None if isnan(row[name]) else row[name] for name in _SECONDS}
        eqn = int(row["eqn"]) if isinstance(row["eqn"], int) else None
        yield {"stage": stage, **row, "eqn": eqn, **costs_of_row, "runners_up": others}


def _matches(row: Mapping[str, Any], path: str) -> bool:
    return path == f"#{row['eqn']}" or fnmatchcase(row["name"], path)


def _explanation(row: Mapping[str, Any]) -> Group:
    """Return a decision: its reason, a table of its candidates, and its costs."""
    number = "" if row["eqn"] is None else f"#{row['eqn']} "
    follows = f"follows {row['follows']}: " if row["kind"] == "follows" else ""
    costs = [
        f"{name.removesuffix('_seconds')} {row[name] * 1e6:.4g} us"
        for name in _SECONDS
        if row[name] is not None
    ]
    reason = f"{number}{row['name']} {row['array']} is {row['result']} ({follows}{row['why']})"
    table = Table("candidate")
    table.add_column("costs more by", justify="right")
    table.add_row(row["choice"], "selected")
    for other in row["runners_up"]:
        table.add_row(other["choice"], f"{other['extra_seconds'] * 1e6:.4g} us")
    memory = f"{row['memory_bytes']:,} bytes per device"
    return Group(escape(reason), table, f"{', '.join([*costs, memory])}\n")
