"""Report pages: plans and their predictions as one HTML file that needs no other file."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, get_args

from autopar.lowering.planned import PlannedStep
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster
from autopar.planning.plan_step import planned_step
from autopar.prediction.predicting import Fidelity, program_of
from autopar.progress import progress_part
from autopar.report.classify import classify
from autopar.report.page_data import Alternative, PlanReport, page_data
from autopar.report.page_template import format_seconds, render_page
from autopar.tracing.arguments import Argnums, BatchArgnums
from simulator.engine.breakdown import prediction_of
from simulator.engine.simulation import simulate
from simulator.files import write_text
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import Role

_PACKAGES = ("autopar", "jax", "jaxlib")


def plan_report(
    name: str,
    plan: Plan,
    fun: Callable[..., Any],
    args: Sequence[Any],
    cluster: AnyCluster | str | Path,
    *,
    tokens: int = 0,
    batch_argnums: BatchArgnums = "auto",
    donate_argnums: Argnums = "auto",
    fidelity: Fidelity = "compiled",
) -> PlanReport:
    """Return a plan with its prediction, for a report page.

    Args:
        name: the heading of the plan on the page.
        plan: the plan.
        fun: the step that it was made for.
        args: the arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
        cluster: the cluster: a description, the name of a shipped one, or the path of a file.
        tokens: number of tokens in the batch, for the throughput.
        batch_argnums: as in `autopar.predict`, like the next two.
        donate_argnums: the arguments whose memory the results reuse.
        fidelity: the source of the program, "compiled" or "analytic".

    Raises:
        PlanError: the plan is for another step.
        OptionError: an option has a type or a value that is not allowed.
    """
    cluster = any_cluster(cluster)
    with progress_part(0, 0.4):
        planned = planned_step(fun, args, plan, batch_argnums=batch_argnums)
    with progress_part(0.4, 0.8):
        program = program_of(planned, cluster, donate_argnums=donate_argnums, fidelity=fidelity)
    prediction = prediction_of(simulate(program, cluster), cluster, tokens=tokens)
    return PlanReport(
        name,
        plan,
        prediction,
        cluster,
        program,
        fidelity,
        _kinds(planned),
    )


def _kinds(planned: PlannedStep) -> dict[tuple[int, str], str]:
    is_pipeline = not planned.plan.schedule.is_whole_step
    return {
        (number, parameter.path): parameter.label
        for number in range(len(planned.plan.stages))
        for parameter in classify(planned, number if is_pipeline else None).parameters
    }


def report_page(
    reports: Sequence[PlanReport],
    alternatives: Sequence[Alternative] = (),
    *,
    command: str = "",
    date: datetime | None = None,
) -> str:
    """Return an HTML page that shows plans side by side.

    The page has its styles, scripts and data inside; it makes no request. Its data are a JSON block
    with the id `data`.

    Args:
        reports: the plans, with their predictions where they have some; at least one.
        alternatives: plans that were considered beside them, for the picture of time and memory.
        command: the command that makes the page, for its provenance.
        date: the date of the page; by default the present.

    Raises:
        ValueError: there is no plan, or two have the same name.
    """
    names = [report.name for report in reports]
    if not names:
        raise ValueError("a page without plans; expected at least one PlanReport")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"two plans are called {repeated[0]!r}; give each its own name")
    provenance = {
        "date": f"{date or datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        **({"command": command} if command else {}),
        **{package: _version(package) for package in _PACKAGES},
        "Python": python_version(),
    }
    data = page_data(reports, alternatives, provenance)
    return render_page("report.html.j2", _headings(data) | {"data": data})


def _headings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the title, the summary and the rows of tables that follow from all plans."""
    plans = data["plans"]
    steps = dict.fromkeys(p["plan"]["step"] for p in plans if p["plan"])
    title = ", ".join(steps) or plans[0]["name"]
    parts = [row["name"] for p in plans if p["prediction"] for row in p["prediction"]["parts"]]
    is_used = {
        row["name"]
        for p in plans
        if p["prediction"]
        for row in p["prediction"]["parts"]
        if row["seconds"]
    }
    return {
        "title": title,
        "summary": _summary(plans),
        "part_names": [name for name in dict.fromkeys(parts) if name in is_used],
        "memory_roles": [
            *(role for role in get_args(Role) if any(role in p["memory"] for p in plans)),
            *dict.fromkeys(
                part for p in plans for part in p["memory"] if part not in get_args(Role)
            ),
        ],
        "num_warnings": sum(len(p["warnings"]) for p in plans),
    }


def _summary(plans: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the fastest plan."""

    def seconds(plan: Mapping[str, Any]) -> float:
        return (plan["prediction"] or {"row": plan["plan"]})["row"]["seconds"]

    best = min(plans, key=seconds)
    word = "Predicted" if best["prediction"] else "Planned"
    text = f"{word} to take {format_seconds(seconds(best))} per step"
    if best["plan"]:
        plan = best["plan"]
        cluster = (best["prediction"] or plan)["cluster"]
        text += f" by {plan['method']} on {plan['devices']} devices of {cluster}"
    if len(plans) > 1:
        text += f"; {best['name']} is the fastest of {len(plans)} plans"
    return f"{text}."


def save_report(
    path: str | Path,
    reports: Sequence[PlanReport],
    alternatives: Sequence[Alternative] = (),
    *,
    command: str = "",
) -> None:
    """Write a report page. The file is replaced as a whole, or not at all.

    Args:
        path: the file, such as report.html.
        reports: as in `report_page`, like the next two.
        alternatives: plans that were considered beside them.
        command: the command that makes the page.

    Raises:
        ValueError: there is no plan, or two have the same name.
        FileError: the file can't be written.
    """
    write_text(path, report_page(reports, alternatives, command=command))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"
