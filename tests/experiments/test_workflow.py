"""The workflow computes its smoke configuration, as users start it, and refuses mistakes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml

from experiments.paper.study import FIGURES, figure_named
from experiments.report.cell_table import rows_of

ROOT = Path(__file__).parents[2]

type Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of the project, which can't change during a run."""
    copy = tmp_path / "a project"
    for folder in ("autopar", "experiments", "simulator", "profiles"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", copy)
    (copy / "results/tables").mkdir(parents=True)
    shutil.copy(ROOT / "results/tables/reach.csv", copy / "results/tables")  # the paper reads it
    return copy


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the empty directory in which the workflow runs."""
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.fixture
def start(project: Path, sweep: Path) -> Iterator[Start]:
    """Yield a function that starts the workflow with a configuration.

    What has not ended with the test, because it failed, is killed.
    """
    runs: list[subprocess.Popen[str]] = []

    def started(config: Path, *arguments: str) -> subprocess.Popen[str]:
        files = ["--snakefile", str(project / "Snakefile"), "--configfile", str(config)]
        command = [sys.executable, "-m", "snakemake", *files, "--cores", "2", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        runs.append(
            subprocess.Popen(command, cwd=sweep, env=environment, text=True, stdout=-1, stderr=-1)
        )
        return runs[-1]

    yield started
    for run in runs:
        if run.poll() is None:
            for process in (*psutil.Process(run.pid).children(recursive=True), run):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.communicate()


def ended(run: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Return a run when it has ended; it hangs if it takes much longer than on a busy machine."""
    output, errors = run.communicate(timeout=1200)
    return subprocess.CompletedProcess(run.args, run.returncode, output, errors)


SMOKE = ROOT / "experiments/config/smoke.yaml"
PAPER_SMOKE = ROOT / "experiments/config/paper-smoke.yaml"


@pytest.mark.slow
def test_the_smoke_sweep_leaves_tables_and_figures_and_then_nothing_to_do(
    start: Start, sweep: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load(SMOKE.read_text())
    # An odd batch can't be split over two devices, so one cell fails.
    config["models"]["mlp"]["odd"] = config["models"]["mlp"]["tiny"] | {"batch_size": 15}
    config["platforms"][1]["models"]["mlp"] = "odd"
    config["meshes"], config["strategies"] = [[2]], ["shard", "manual_fsdp"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))

    first = ended(start(path))
    assert first.returncode == 0, first.stdout + first.stderr

    cells = rows_of(pd.read_parquet(sweep / "results/measured/cells.parquet"))
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
    assert all(row["total_time_s"] > row["compile_time_s"] for row in done)

    lines = first.stdout.splitlines()
    assert lines[0] == "4 cells to compute. Ctrl-C stops; the same command goes on."
    assert lines[-1].startswith("Done in ")
    assert sum(" ok  (" in line for line in lines) == 3
    assert sum("FAILED ValueError: argument 1/x: dim 0" in line for line in lines) == 1
    assert sorted(re.findall(r"\((\d)/4", first.stdout)) == ["1", "2", "3", "4"]
    assert max(map(len, lines + first.stderr.splitlines())) < 400
    assert len(lines) < 20

    tables = pd.read_csv(sweep / "results/tables/cells.csv")
    assert set(tables["source"]) == {"simulated"}
    figures = {str(path.relative_to(sweep / "results")) for path in sweep.rglob("*.svg")}
    assert figures == {
        "figures/simulated/p3.16xlarge/mlp-tiny.svg",
        "measured/figures/cpu-virtual/mlp-odd.svg",
    }
    index = (sweep / "results/report/index.html").read_text()
    pages = set(re.findall(r'href="(cells/[^"]+)"', index))
    assert len(pages) == len(cells)  # the page of a cell that failed says why
    assert all((sweep / "results/report" / page).is_file() for page in pages)
    fit = pd.read_csv(sweep / "results/measured/collectives_fit.csv")
    assert list(fit["kind"]) == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
    ]
    assert (fit["held_out_rows"] > 0).all()

    second = ended(start(path))
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.splitlines() == [
        "Nothing to do: 4 cells, tables and figures are up to date."
        " --forceall computes everything again."
    ]

    assert not (sweep / "results/recorded").exists()
    recorded = ended(start(path, "record"))
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    for name in ("cells.csv", "collectives_fit.csv", "figures/cpu-virtual/mlp-odd.svg"):
        measured, tracked = (sweep / "results" / f / name for f in ("measured", "recorded"))
        assert measured.read_bytes() == tracked.read_bytes()


def processes_in(directory: Path) -> list[str]:
    """Return the command lines of the processes that run in a directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_keeps_its_cells_and_the_next_one_goes_on(
    start: Start, sweep: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config = yaml.safe_load(SMOKE.read_text())
    config["strategies"] = ["pmap", "shard", "zero2", "zero3", "manual_fsdp"]
    config["meshes"], config["platforms"] = [[2]], config["platforms"][:1]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    target = "results/figures/simulated/p3.16xlarge/mlp-tiny.svg"

    run = start(path, target)
    unfinished = sweep / "results/cells/simulated/p3.16xlarge/mlp-tiny/2.unfinished"
    while not (unfinished / "shard.json").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(number)
    stopped = ended(run)
    assert stopped.returncode != 0
    if number != signal.SIGKILL:
        assert "Stopped. Results so far are kept" in stopped.stdout
    assert "Traceback" not in stopped.stdout + stopped.stderr
    deadline = time.monotonic() + 10
    while processes_in(sweep) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(sweep) == []
    files = {path.name: path.read_text() for path in unfinished.glob("*.json")}
    assert all(json.loads(text) for text in files.values())  # whole files
    done = [name for name in config["strategies"] if f"{name}.json" in files]
    assert "shard" in done
    # The files of a cell that was stopped before its result are written again.
    kept = {name: text for name, text in files.items() if name.partition(".")[0] in [*done, "job"]}
    assert "FAILED" not in stopped.stdout

    second = ended(start(path, target))
    assert second.returncode == 0, second.stdout + second.stderr
    assert (sweep / target).exists()
    results = unfinished.with_name("2")
    assert {name: (results / name).read_text() for name in kept} == kept
    assert "(3/5" in second.stdout or "(4/5" in second.stdout or "(5/5" in second.stdout
    assert "(1/5" not in second.stdout


@pytest.mark.slow
def test_a_second_run_at_the_same_time_is_refused(start: Start, sweep: Path) -> None:
    first = start(SMOKE)
    while not (sweep / "results/progress.jsonl").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    second = ended(start(SMOKE))
    assert second.returncode != 0
    assert f"another run of the sweep is writing to {sweep / 'results'}" in (
        second.stdout + second.stderr
    )
    assert "Traceback" not in second.stdout + second.stderr
    first.send_signal(signal.SIGINT)
    assert "Stopped." in ended(first).stdout


@pytest.mark.slow
def test_a_job_that_fails_is_one_line(start: Start, project: Path, tmp_path: Path) -> None:
    (project / "experiments/scripts/draw_figures.py").write_text("raise ValueError('no ink')\n")
    config = yaml.safe_load(SMOKE.read_text())
    config["meshes"], config["strategies"] = [[1]], ["serial"]
    config["platforms"] = config["platforms"][:1]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    failed = ended(start(path, "results/figures/simulated/p3.16xlarge/mlp-tiny.svg"))
    assert failed.returncode != 0
    assert [line for line in failed.stdout.splitlines() if "FAILED" in line or "ink" in line] == [
        "FAILED draw_figures results/figures/simulated/p3.16xlarge/mlp-tiny.svg: ValueError: no ink"
        " (log: results/logs/figures/simulated/p3.16xlarge/mlp-tiny.log)",
        "Some jobs failed; see FAILED above. The same command tries them again.",
    ]
    assert max(map(len, (failed.stdout + failed.stderr).splitlines())) < 400


@pytest.mark.slow
def test_a_misspelt_key_stops_the_workflow_before_it_starts(
    start: Start, sweep: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("measures: {warmup: 1}\n")
    failed = ended(start(path))
    assert failed.returncode != 0
    assert "unknown key 'measures'; did you mean 'measure'?" in failed.stdout + failed.stderr
    assert not (sweep / "results").exists()


@pytest.mark.slow
def test_the_paper_is_written_and_what_is_changed_by_hand_is_written_again(
    start: Start, sweep: Path, project: Path
) -> None:
    begun = time.monotonic()
    first = ended(start(PAPER_SMOKE, "paper"))
    assert first.returncode == 0, first.stdout + first.stderr
    assert time.monotonic() - begun < 400
    assert "FAILED" not in first.stdout, first.stdout
    results = sweep / "results/paper-smoke"
    assert (results / "paper.pdf").read_bytes().startswith(b"%PDF")
    summary = pd.read_csv(results / "summary.csv")
    assert list(summary["figure"]) == [figure.name for figure in FIGURES]
    assert (summary["rows"] > 0).all()
    assert (summary["failed"] == 0).all()
    page = (results / "index.html").read_text()
    assert all(f"{figure.name}: " in page for figure in FIGURES)

    nothing = ended(start(PAPER_SMOKE, "paper"))
    assert nothing.stdout.startswith("Nothing to do"), nothing.stdout + nothing.stderr

    table, drawing = results / "korthikanti_memory.csv", results / "korthikanti_step_times.svg"
    before = {path: path.read_bytes() for path in (table, drawing, results / "paper.pdf")}
    table.write_text(table.read_text().replace("59.25", "60.25"))
    drawing.write_text(drawing.read_text().replace("</svg>", "<!-- by hand --></svg>"))
    third = ended(start(PAPER_SMOKE, "paper"))
    assert third.returncode == 0, third.stdout + third.stderr
    for path in (table, drawing):
        name = path.relative_to(sweep)
        assert (
            f"{name} is not as it was written; `snakemake paper` writes it again." in third.stdout
        )
    assert {path: path.read_bytes() for path in before} == before
    assert ended(start(PAPER_SMOKE, "paper")).stdout.startswith("Nothing to do")

    published = project / "simulator/validation/data/published/korthikanti_table5.csv"
    rows = published.read_text()
    published.write_text(rows.replace("1.42", "1.52"))
    fourth = ended(start(PAPER_SMOKE, "paper"))
    assert fourth.stdout.startswith("1 cells to compute"), fourth.stdout
    assert "1.52" in (results / "korthikanti_step_times.csv").read_text()
    published.unlink()
    refused = ended(start(PAPER_SMOKE, "paper"))
    assert refused.returncode != 0
    assert f"published numbers: no file {published}" in refused.stdout + refused.stderr


@pytest.mark.slow
def test_cells_of_the_paper_run_as_jobs_of_a_cluster(
    start: Start, sweep: Path, tmp_path: Path
) -> None:
    """The cluster is a script that starts each job in the background and prints its number."""
    submit = tmp_path / "submit"
    submit.write_text(
        f'#!/bin/sh\ncp "$1" {sweep}/job.sh\nsetsid sh "$1" > {sweep}/job.log 2>&1 &\necho $!\n'
    )
    submit.chmod(0o755)
    cell = "results/paper-smoke/cells/korthikanti_memory/all.csv"
    cluster = ("--executor", "cluster-generic", "--jobs", "2")
    run = ended(start(PAPER_SMOKE, cell, *cluster, "--cluster-generic-submit-cmd", str(submit)))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("1 cells to compute"), run.stdout
    table = pd.read_csv(sweep / cell)
    assert set(table["status"]) == {"ok"}
    log = (sweep / "job.log").read_text()
    assert "(1/1)" in log  # the job's line, with how far the run is
    memory = figure_named("korthikanti_memory").resources["mem_mb"]
    assert f'"mem_mb": {memory}' in (sweep / "job.sh").read_text()
    again = ended(start(PAPER_SMOKE, cell, *cluster, "--cluster-generic-submit-cmd", str(submit)))
    assert again.stdout.startswith("Nothing to do: what was asked for is up to date"), again.stdout
