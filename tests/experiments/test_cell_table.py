"""Tables have a row for each cell and each published result, and relative errors between them."""

import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.cells import Cell, read_cell, read_job, write_cell, write_job
from experiments.report.cell_table import COLUMNS, cell_table, quickstart_table, rows_of
from experiments.scripts import draw_figures, write_tables
from experiments.sources import ROOT
from experiments.sweep_job import Job

SIZES = {"dim": 4, "num_layers": 2, "batch_size": 6}
PAPER = {"source": "A paper", "model": "mlp", "size": "tiny", "cluster": "p3.16xlarge"} | {
    "rows": [
        {
            "strategy": "serial",
            "mesh": [1],
            "step_time_ms": 20,
            "step_time_std_ms": 1,
            "memory_gib_per_device": 2.0,
        },
        {
            "strategy": "shard",
            "mesh": [8],
            "step_time_ms": 4,
            "step_time_std_ms": 0.5,
            "memory_gib_per_device": 0.5,
        },
    ]
}
OTHER_PAPER = PAPER | {"model": "gpt"}


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Return two jobs.

    On one device serial is 10 % too slow, with half the memory. On 8 devices shard failed, and
    zero2 has no result.
    """
    one = Job("simulated", "mlp", "tiny", SIZES, "p3.16xlarge", (1,), ("serial",))
    eight = Job("simulated", "mlp", "tiny", SIZES, "p3.16xlarge", (8,), ("shard", "zero2"))
    places = [tmp_path / job.name for job in (one, eight)]
    for place, job in zip(places, (one, eight), strict=True):
        write_job(place, job)
    cell = Cell(step_time_s=0.022, memory_bytes_per_device=2**30, compile_time_s=1.5)
    write_cell(one, places[0], "serial", cell)
    write_cell(eight, places[1], "shard", Cell("failed", "no rule for sort"))
    return places


def test_every_cell_and_every_published_number_is_a_row(directories: list[Path]) -> None:
    table = cell_table(directories, [PAPER, OTHER_PAPER])
    assert list(table.columns) == list(COLUMNS)
    rows = rows_of(table)
    assert [[row[name] for name in ("strategy", "mesh", "source", "status")] for row in rows] == [
        ["serial", "1", "simulated", "ok"],
        ["shard", "8", "simulated", "failed"],
        ["zero2", "8", "simulated", "failed"],
        ["serial", "1", "paper", "ok"],
        ["shard", "8", "paper", "ok"],
    ]
    assert rows[1]["reason"] == "no rule for sort"
    assert rows[2]["reason"].startswith("no result at")
    assert {name: value for name, value in rows[0].items() if value is not None} == {
        "model": "mlp",
        "size": "tiny",
        "parameters": 4 * 16 + 16 + 16 * 4 + 4,
        "batch": 6,
        "dtype": "float32",
        "devices": 1,
        "mesh": "1",
        "strategy": "serial",
        "platform": "p3.16xlarge",
        "source": "simulated",
        "step_time_s": 0.022,
        "memory_bytes_per_device": 2**30,
        "compile_time_s": 1.5,
        "status": "ok",
        "reason": "",
    }


def test_predictions_stand_beside_published_numbers_with_their_error(
    directories: list[Path],
) -> None:
    serial, shard = rows_of(quickstart_table(cell_table(directories, [PAPER])))
    assert (serial["published_step_time_ms"], serial["predicted_step_time_ms"]) == (20.0, 22.0)
    assert serial["step_time_error_percent"] == 10.0
    assert (serial["published_memory_gib"], serial["predicted_memory_gib"]) == (2.0, 1.0)
    assert serial["memory_error_percent"] == -50.0
    assert shard["published_step_time_ms"] == 4.0
    assert shard["predicted_step_time_ms"] is None
    assert shard["step_time_error_percent"] is None


def test_csv_and_parquet_of_this_machine_hold_the_same_table(
    directories: list[Path], tables: Path
) -> None:
    write_tables.main(*written(tables), *map(str, directories))
    table = rows_of(pd.read_parquet(tables / "measured/cells.parquet"))
    text = pd.read_csv(tables / "measured/cells.csv", keep_default_na=False, na_values=[""])
    rows = rows_of(text.astype(COLUMNS))
    assert [row | {"reason": row["reason"] or ""} for row in rows] == table


def test_the_tracked_table_has_nothing_of_this_machine(
    directories: list[Path], tables: Path
) -> None:
    write_tables.main(*written(tables), *map(str, directories))
    before = (tables / "cells.csv").read_bytes()
    slower = Cell(
        step_time_s=0.022 * (1 + 1e-9),
        memory_bytes_per_device=2**30,
        planning_time_s=9.0,
        compile_time_s=99.0,
        total_time_s=109.0,
    )
    job = read_job(directories[0])
    write_cell(job, directories[0], "serial", slower)
    measured = replace(job, source="measured")
    write_job(tables / "run", measured)
    write_cell(measured, tables / "run", "serial", Cell(step_time_s=random.random()))
    write_tables.main(*written(tables), *map(str, [*directories, tables / "run"]))
    assert (tables / "cells.csv").read_bytes() == before
    assert "measured" in (tables / "measured/cells.csv").read_text()
    assert "109" in (tables / "measured/cells.csv").read_text()


def test_a_figure_is_the_same_file_every_time(directories: list[Path], tables: Path) -> None:
    _, _, published = written(tables)
    for name in ("one.svg", "other.svg"):
        draw_figures.main(str(tables / name), published, *map(str, directories))
    one, other = ((tables / name).read_text() for name in ("one.svg", "other.svg"))
    assert one == other
    assert "published" in one  # the diamonds of the paper
    assert "<dc:date>" not in one
    assert "Matplotlib v" not in one


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Return a directory with a file of published numbers, and a folder for measured tables."""
    (tmp_path / "measured").mkdir()
    (tmp_path / "published.yaml").write_text(yaml.safe_dump([PAPER]))
    return tmp_path


def written(tables: Path) -> tuple[str, str, str]:
    """Return the first arguments of `write_tables`."""
    return str(tables), str(tables / "measured"), str(tables / "published.yaml")


def test_no_committed_row_is_faster_than_the_plan_with_every_option_open() -> None:
    cells = pd.read_csv(ROOT / "results/tables/cells.csv").query("source == 'simulated'")
    groups = cells.groupby(["model", "size", "platform", "mesh"])
    compared = 0
    for name, group in groups:
        seconds = group.set_index("strategy")["step_time_s"]
        if "pipeshard" in seconds:
            assert seconds["pipeshard"] <= 1.0001 * seconds.min(), name
            compared += 1
    assert compared >= 9


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"status": "ok", "step_ti', "Unterminated string"),
        ('{"status": "ok", "seconds": 1.0}', ".*unexpected keyword argument 'seconds'"),
        ("[]", ".*must be a mapping"),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "shard.json"
    path.write_text(text)
    message = rf"^{path}: is no result of a cell \({reason}.*; delete it and run the sweep again$"
    with pytest.raises(ValueError, match=message):
        read_cell(tmp_path, "shard")
