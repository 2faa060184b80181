"""A page for each cell, from its saved plan, program and timeline, or from its result alone."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar import Plan
from autopar.report import PageTable, PlanReport, save_report, table_page
from experiments.cells import plan_path, program_path, read_cell, read_job, timeline_path
from experiments.sweep_job import Job, mesh_name
from simulator import Cluster, load_program, load_timeline, prediction_of
from simulator.files import write_text


def page_path(row: Mapping[str, Any]) -> Path:
    """Return the page of a cell, below the folder of the report.

    Args:
        row: the row of the cell, with the columns of `experiments.report.cell_table.COLUMNS`.
    """
    job = f"{row['source']}/{row['platform']}/{row['model']}-{row['size']}/{row['mesh']}"
    return _page(job, row["strategy"])


def _page(job: str, strategy: str) -> Path:
    return Path("cells") / job / f"{strategy}.html"


def write_cell_pages(cells: Iterable[Path], folder: Path) -> set[Path]:
    """Write the page of every cell.

    Args:
        cells: the directories of the results of jobs.
        folder: the folder of the report.

    Returns:
        The pages, below `folder`.
    """
    pages = set()
    for directory in cells:
        job = read_job(directory)
        for strategy in job.strategies:
            page = _page(job.name, strategy)
            (folder / page).parent.mkdir(parents=True, exist_ok=True)
            report = _plan_report(directory, job, strategy)
            if report is not None:
                save_report(folder / page, [report])
            else:
                write_text(folder / page, _result_page(directory, job, strategy))
            pages.add(page)
    return pages


def _name(job: Job, strategy: str) -> str:
    return f"{strategy}, {job.model}-{job.size} on {job.platform}"


def _plan_report(directory: Path, job: Job, strategy: str) -> PlanReport | None:
    """Return the plan and the prediction of a cell; None if it has neither."""
    files = [path(directory, strategy) for path in (plan_path, program_path, timeline_path)]
    plan_file, program_file, timeline_file = files
    name = _name(job, strategy)
    plan = Plan.load(plan_file) if plan_file.exists() else None
    if timeline_file.exists():
        cluster = Cluster.load(job.cluster)
        prediction = prediction_of(load_timeline(timeline_file), cluster)
        program = load_program(program_file) if program_file.exists() else None
        return PlanReport(name, plan, prediction, cluster, program, "compiled")
    return None if plan is None else PlanReport(name, plan)


def _result_page(directory: Path, job: Job, strategy: str) -> str:
    """Return a page with the result of a cell without a prediction or without a plan."""
    result = asdict(read_cell(directory, strategy))
    columns = {"mesh": mesh_name(job.mesh), "source": job.source} | result
    rows = [(key, value) for key, value in columns.items() if value not in (None, "")]
    table = PageTable("Result", ("quantity", "value"), rows, note=_NO_PLAN)
    return table_page(_name(job, strategy), [table], {})


_NO_PLAN = (
    "This cell has no plan and no prediction: it failed, no plan fits in memory, or it measures a"
    " step that is written by hand. Times are in seconds, memory is in bytes."
)
