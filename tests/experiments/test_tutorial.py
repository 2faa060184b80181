"""Tutorials run and print what they should."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiers

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.slow
def test_the_quickstart_prints_its_two_comparisons() -> None:
    flags = ["--dim", "32", "--batch-size", "32", "--num-layers", "2"]
    command = [sys.executable, "-m", "experiments.tutorials.quickstart", *flags]
    run = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    number = r"\s+(\d+\.\d+)"
    for name in ("Serial execution", "Alpa execution", "Data parallel execution"):
        assert re.search(rf"{name} time\.\s+Mean:{number} ms, Std:{number} ms", run.stdout)
        assert re.search(rf"{name} per GPU memory usage:{number} GB", run.stdout)


@pytest.mark.slow
def test_the_pipeline_tutorial_trains_with_stages_by_hand_and_found() -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.tutorials.pipeshard",
        "--dim",
        "32",
        "--batch-size",
        "32",
    ]
    shown = {**os.environ, "AUTOPAR_PROGRESS": "1"}
    run = subprocess.run(command, text=True, capture_output=True, timeout=240, env=shown)
    assert run.returncode == 0, run.stderr
    assert "Manual assignment: equal to the single device" in run.stdout
    assert "Automatic assignment: equal to the single device" in run.stdout
    assert re.search(
        r"stage 1: layers 1 on devices 4-7, mesh [\dx ]+; \d+ tasks compiled in [\d.]+ s",
        run.stderr,
    )


@pytest.mark.slow
def test_the_tutorial_on_distributed_arrays_prints_what_it_should() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "experiments.tutorials.intro_to_distributed"],
        text=True,
        capture_output=True,
        timeout=120,
        # Pictures of shardings are as wide as the terminal.
        env={**os.environ, "COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == (GOLDEN / "intro_to_distributed.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_schedule_tutorial_prints_the_model_the_match_and_one_all_reduce() -> None:
    """The environment sets up no devices."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    command = [
        sys.executable,
        "-m",
        "experiments.tutorials.slapo_mlp",
        "--devices",
        "2",
        "--sequence-length",
        "16",
    ]
    run = subprocess.run(command, text=True, capture_output=True, timeout=120, env=plain)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == (GOLDEN / "slapo_mlp.txt").read_text().splitlines()


@pytest.mark.parametrize("devices", tiers([1, 4, 8]))
def test_the_schedule_tutorial_differs_only_in_sizes_on_more_devices_or_one(
    devices: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward pass has one all_reduce, and none on a single device."""
    monkeypatch.setattr(
        sys, "argv", ["slapo_mlp", "--devices", str(devices), "--sequence-length", "16"]
    )
    runpy.run_module("experiments.tutorials.slapo_mlp", run_name="__main__")
    expected = (GOLDEN / "slapo_mlp.txt").read_text()
    for two, here in (
        ("devices: 2", f"devices: {devices}"),
        ("(1024, 512) on each", f"(1024, {1024 // devices}) on each"),
        ("forward pass: 1", f"forward pass: {min(devices - 1, 1)}"),
    ):
        assert two in expected
        expected = expected.replace(two, here)
    assert capsys.readouterr().out.splitlines() == expected.splitlines()
