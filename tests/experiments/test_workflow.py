"""The workflow computes its smoke configuration, as users start it, and refuses mistakes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.report.cell_table import rows_of

ROOT = Path(__file__).parents[2]

type Snakemake = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def snakemake(tmp_path: Path) -> Snakemake:
    """Return a function that runs snakemake in an empty directory, on a copy of the project.

    A copy can't change during the run.
    """
    project, results = tmp_path / "project", tmp_path / "sweep"
    for package in ("autopar", "experiments", "simulator"):
        shutil.copytree(
            ROOT / package, project / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "Snakefile", project)
    results.mkdir()

    def run(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        files = ["--snakefile", str(project / "Snakefile"), "--configfile", str(config)]
        command = [sys.executable, "-m", "snakemake", *files, "--cores", "2", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        return subprocess.run(
            command, cwd=results, env=environment, text=True, capture_output=True, timeout=400
        )

    return run


@pytest.mark.slow
def test_the_smoke_sweep_leaves_tables_and_figures_and_then_nothing_to_do(
    snakemake: Snakemake, tmp_path: Path
) -> None:
    config = yaml.safe_load((ROOT / "experiments/config/smoke.yaml").read_text())
    # An odd batch can't be split over two devices, so one cell fails.
    config["models"]["mlp"]["odd"] = config["models"]["mlp"]["tiny"] | {"batch_size": 15}
    config["platforms"][1]["models"]["mlp"] = "odd"
    config["meshes"], config["strategies"] = [[2]], ["shard", "manual_fsdp"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))

    first = snakemake(path)
    assert first.returncode == 0, first.stdout + first.stderr

    cells = rows_of(pd.read_parquet(tmp_path / "sweep/results/tables/cells.parquet"))
    failed = [row for row in cells if row["status"] == "failed"]
    done = [row for row in cells if row["status"] == "ok"]
    assert [(row["source"], row["size"], row["mesh"], row["strategy"]) for row in cells] == [
        ("simulated", "tiny", "2", "shard"),
        ("simulated", "tiny", "2", "manual_fsdp"),
        ("measured", "odd", "2", "shard"),
        ("measured", "odd", "2", "manual_fsdp"),
    ]
    assert [(row["size"], row["mesh"], row["strategy"]) for row in failed] == [
        ("odd", "2", "manual_fsdp")
    ]
    assert failed[0]["reason"].startswith(
        "ValueError: argument 1/x: dim 0 of its shape (15, 16) can't be split over"
    )
    assert len(done) == len(cells) - 1
    assert all(row["step_time_s"] > 0 and row["memory_bytes_per_device"] > 0 for row in done)
    assert all(row["equality_error"] < 5e-3 for row in done if row["source"] == "measured")
    assert all(row["planning_time_s"] > 0 for row in done if row["strategy"] == "shard")
    assert "FAILED" in first.stdout  # progress, a line per cell
    assert len(list((tmp_path / "sweep/results/figures").rglob("*.svg"))) == 2
    fit = pd.read_csv(tmp_path / "sweep/results/tables/collectives_fit.csv")
    assert list(fit["kind"]) == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
    ]
    assert (fit["held_out_rows"] > 0).all()

    second = snakemake(path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Nothing to be done" in second.stdout + second.stderr


@pytest.mark.slow
def test_a_misspelt_key_stops_the_workflow_before_it_starts(
    snakemake: Snakemake, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("measures: {warmup: 1}\n")
    failed = snakemake(path)
    assert failed.returncode != 0
    assert "unknown key 'measures'; did you mean 'measure'?" in failed.stdout + failed.stderr
    assert not (tmp_path / "sweep/results").exists()
