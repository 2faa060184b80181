"""The table of all cells, and the comparison of predictions with published numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.cells import Cell, read_cell, read_job
from experiments.models import Model, build_model
from experiments.sweep_job import Job, mesh_name

COLUMNS: dict[str, Any] = {
    "model": "string",
    "size": "string",
    "parameters": "Int64",
    "batch": "Int64",
    "dtype": "string",
    "devices": "Int64",
    "mesh": "string",
    "strategy": "string",
    "platform": "string",
    "source": "string",
    "step_time_s": "Float64",
    "step_time_std_s": "Float64",
    "memory_bytes_per_device": "Int64",
    "equality_error": "Float64",
    "planning_time_s": "Float64",
    "compile_time_s": "Float64",
    "total_time_s": "Float64",
    "status": "string",
    "reason": "string",
}
"""Columns of the table of all cells and their types."""

OF_THIS_MACHINE = ["equality_error", "planning_time_s", "compile_time_s", "total_time_s"]
"""Columns with numbers that another run or machine does not repeat."""

COMPARISON = [
    "model",
    "size",
    "mesh",
    "strategy",
    "platform",
    "published_step_time_ms",
    "predicted_step_time_ms",
    "step_time_error_percent",
    "published_memory_gib",
    "predicted_memory_gib",
    "memory_error_percent",
    "published_in",
]
"""Columns of quickstart.csv."""

CELL = ["model", "size", "mesh", "strategy", "platform"]
"""The columns that identify the cell of a row; `source` says where its numbers come from."""


def cell_table(directories: Iterable[Path], published: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row for each cell, and one for each published result of the same models.

    Args:
        directories: the directories of results, one for each job.
        published: the entries of the file of published numbers.
    """
    sizes: dict[tuple[str, str], Mapping[str, Any]] = {}
    rows = []
    for directory in directories:
        job = read_job(directory)
        sizes[job.model, job.size] = job.sizes
        rows += [
            _cell_row(job, strategy, read_cell(directory, strategy)) for strategy in job.strategies
        ]
    for paper in published:
        if numbers := sizes.get((paper["model"], paper["size"])):
            rows += [_published_row(paper, row, numbers) for row in paper["rows"]]
    rows = [{name: _rounded(value) for name, value in row.items()} for row in rows]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def predicted_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the part of the table of cells that is the same on every machine.

    These are the simulated and the published rows, without the columns `OF_THIS_MACHINE`.
    """
    return cells.query("source != 'measured'").drop(columns=OF_THIS_MACHINE)


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as plain Python values; a missing one is None."""
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in table.to_dict("records")
    ]


def quickstart_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Return published numbers and predictions of the same cells, with errors in percent.

    Errors are relative to the published number; positive if the prediction is larger.
    """
    rows = rows_of(cells)
    ours = {_cell(row): row for row in rows if row["source"] == "simulated"}
    compared = [
        _comparison(row, ours[_cell(row)])
        for row in rows
        if row["source"] == "paper" and _cell(row) in ours
    ]
    return pd.DataFrame(compared, columns=COMPARISON)


def _cell(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in CELL)


def _comparison(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    compared = {name: paper[name] for name in CELL}
    for column, name, unit_name, unit in (
        ("step_time_s", "step_time", "ms", 1e-3),
        ("memory_bytes_per_device", "memory", "gib", 2**30),
    ):
        compared[f"published_{name}_{unit_name}"] = round(paper[column] / unit, 3)
        if ours[column] is not None:
            compared[f"predicted_{name}_{unit_name}"] = round(ours[column] / unit, 3)
            compared[f"{name}_error_percent"] = round(100 * (ours[column] / paper[column] - 1), 1)
    return compared | {"published_in": paper["reason"]}


def _cell_row(job: Job, strategy: str, cell: Cell) -> dict[str, Any]:
    return _job_columns(job) | {"strategy": strategy} | asdict(cell)


def _published_row(
    paper: Mapping[str, Any], row: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    strategies = (row["strategy"],)
    job = Job(
        "simulated", paper["model"], paper["size"], sizes, paper["cluster"], row["mesh"], strategies
    )
    return _job_columns(job) | {
        "strategy": row["strategy"],
        "source": "paper",
        "step_time_s": row["step_time_ms"] / 1e3,
        "step_time_std_s": row["step_time_std_ms"] / 1e3,
        "memory_bytes_per_device": round(row["memory_gib_per_device"] * 2**30),
        "status": "ok",
        "reason": paper["source"],
    }


def _job_columns(job: Job) -> dict[str, Any]:
    """Return the columns that all cells of a job share."""
    model = build_model(job.model, job.sizes)
    return {
        "model": job.model,
        "size": job.size,
        "parameters": _num_parameters(model),
        "batch": model.batch_size,
        "dtype": model.dtype,
        "devices": job.num_devices,
        "mesh": mesh_name(job.mesh),
        "platform": job.platform,
        "source": job.source,
    }


def _rounded(value: Any) -> Any:
    """Round a float to six digits, more than clocks and models resolve."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@cache
def _num_parameters(model: Model) -> int:
    return model.num_parameters
