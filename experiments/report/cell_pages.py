"""A report page for each cell, from its saved plan and timeline."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar import Plan
from autopar.report import PlanReport, save_report
from experiments.cells import plan_path, read_job, timeline_path
from experiments.sweep_job import Job
from simulator import Cluster, load_timeline, prediction_of


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
    """Write the page of every cell that has a plan or a timeline.

    Args:
        cells: the directories of the results of jobs.
        folder: the folder of the report.

    Returns:
        The pages, below `folder`. A cell without plan and timeline, such as one that failed, has
        none.
    """
    pages = set()
    for directory in cells:
        job = read_job(directory)
        for strategy in job.strategies:
            for report in _reports(directory, job, strategy):
                page = _page(job.name, strategy)
                (folder / page).parent.mkdir(parents=True, exist_ok=True)
                save_report(folder / page, [report])
                pages.add(page)
    return pages


def _reports(directory: Path, job: Job, strategy: str) -> Iterator[PlanReport]:
    """Yield the plan and the prediction of a cell, if it has one of them."""
    plan_file, timeline_file = plan_path(directory, strategy), timeline_path(directory, strategy)
    name = f"{strategy}, {job.model}-{job.size} on {job.platform}"
    plan = Plan.load(plan_file) if plan_file.exists() else None
    if timeline_file.exists():
        cluster = Cluster.load(job.cluster)
        prediction = prediction_of(load_timeline(timeline_file), cluster)
        yield PlanReport(name, plan, prediction, cluster, fidelity="compiled")
    elif plan is not None:
        yield PlanReport(name, plan)
