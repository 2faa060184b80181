from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.cells import Cell, write_cell, write_job
from experiments.job import Job
from experiments.report.tables import COLUMNS, cell_table, quickstart_table
from experiments.scripts import tables

SIZES = {"dim": 4, "num_layers": 2, "batch_size": 6}
PAPER = {"source": "A paper", "model": "mlp", "size": "tiny", "cluster": "p3.16xlarge"} | {
    "rows": [
        {"strategy": "serial", "mesh": [1], "step_time_ms": 20, "step_time_std_ms": 1, "memory_gib_per_device": 2.0},
        {"strategy": "shard", "mesh": [8], "step_time_ms": 4, "step_time_std_ms": 0.5, "memory_gib_per_device": 0.5},
    ]
}
OTHER_PAPER = PAPER | {"model": "gpt"}


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Two jobs: serial on one simulated device, 10 % too slow and with half the memory; on 8 shard failed and zero2 is missing."""
    one = Job("mlp", "tiny", SIZES, "p3.16xlarge", (1,), ("serial",))
    eight = Job("mlp", "tiny", SIZES, "p3.16xlarge", (8,), ("shard", "zero2"))
    places = [tmp_path / "simulated" / job.name for job in (one, eight)]
    for place, job in zip(places, (one, eight), strict=True):
        write_job(place, job)
    cell = Cell(step_time_s=0.022, memory_bytes_per_device=2**30, compile_time_s=1.5)
    write_cell("simulate", one, places[0], "serial", cell)
    write_cell("simulate", eight, places[1], "shard", Cell("failed", "no rule for sort"))
    return places


def test_every_cell_and_every_published_number_is_a_row(directories: list[Path]) -> None:
    table = cell_table(directories, [PAPER, OTHER_PAPER])
    assert list(table.columns) == list(COLUMNS)
    assert table[["strategy", "mesh", "source", "status"]].to_numpy().tolist() == [
        ["serial", "1", "simulated", "ok"],
        ["shard", "8", "simulated", "failed"],
        ["zero2", "8", "simulated", "failed"],
        ["serial", "1", "paper", "ok"],
        ["shard", "8", "paper", "ok"],
    ]
    assert table["reason"][1] == "no rule for sort"
    assert table["reason"][2].startswith("no result at")
    first = {name: value for name, value in table.iloc[0].items() if not pd.isna(value)}
    assert first == {
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


def test_predictions_stand_beside_published_numbers_with_their_error(directories: list[Path]) -> None:
    table = quickstart_table(cell_table(directories, [PAPER]))
    serial, shard = table.to_dict("records")
    assert (serial["published_step_time_ms"], serial["predicted_step_time_ms"]) == (20.0, 22.0)
    assert serial["step_time_error_percent"] == 10.0
    assert (serial["published_memory_gib"], serial["predicted_memory_gib"]) == (2.0, 1.0)
    assert serial["memory_error_percent"] == -50.0
    assert shard["published_step_time_ms"] == 4.0
    assert pd.isna(shard["predicted_step_time_ms"])
    assert pd.isna(shard["step_time_error_percent"])


def test_csv_and_parquet_hold_the_same_table(directories: list[Path], tmp_path: Path) -> None:
    published = tmp_path / "published.yaml"
    published.write_text(yaml.safe_dump([PAPER]))
    tables.main(str(tmp_path), str(published), *map(str, directories))
    table = pd.read_parquet(tmp_path / "cells.parquet")
    again = pd.read_csv(tmp_path / "cells.csv", dtype=COLUMNS, keep_default_na=False, na_values={"": ""})
    again["reason"] = again["reason"].fillna("")
    pd.testing.assert_frame_equal(table, again)
