import os
import re
import subprocess
import sys
from pathlib import Path


def test_the_quickstart_prints_its_two_comparisons() -> None:
    flags = ["--dim", "32", "--batch-size", "32", "--num-layers", "2"]
    command = [sys.executable, "-m", "experiments.tutorials.quickstart", *flags]
    run = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    number = r"\s+(\d+\.\d+)"
    for name in ("Serial execution", "Alpa execution", "Data parallel execution"):
        assert re.search(rf"{name} time\.\s+Mean:{number} ms, Std:{number} ms", run.stdout)
        assert re.search(rf"{name} per GPU memory usage:{number} GB", run.stdout)


def test_the_pipeline_tutorial_trains_with_stages_by_hand_and_found() -> None:
    command = [sys.executable, "-m", "experiments.tutorials.pipeshard", "--dim", "32", "--batch-size", "32"]
    shown = {**os.environ, "AUTOPAR_PROGRESS": "1"}
    run = subprocess.run(command, text=True, capture_output=True, timeout=240, env=shown)
    assert run.returncode == 0, run.stderr
    assert "Manual assignment: equal to the single device" in run.stdout
    assert "Automatic assignment: equal to the single device" in run.stdout
    assert re.search(r"stage 1: layers 1 on devices 4-7, mesh [\dx ]+; \d+ tasks compiled in [\d.]+ s", run.stderr)


def test_the_tutorial_on_distributed_arrays_prints_what_it_should() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "experiments.tutorials.intro_to_distributed"],
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},  # the pictures of shardings are as wide as the terminal allows
    )
    assert run.returncode == 0, run.stderr
    golden = Path(__file__).parents[1] / "golden/intro_to_distributed.txt"
    assert run.stdout.splitlines() == golden.read_text().splitlines()


def test_the_schedule_tutorial_prints_the_model_the_match_and_one_all_reduce() -> None:
    command = [sys.executable, "-m", "experiments.tutorials.slapo_mlp", "--devices", "4", "--hidden-size", "64"]
    run = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "(linear1): Dense(bias=float32[64], kernel=float32[64, 64])" in run.stdout
    assert "[linear1/reshape, linear1/add, mul, neg, mul:1, erfc, mul:2]" in run.stdout
    assert "mul:2 = BiasGeLU_0(linear1/bias, linear1/dot_general)" in run.stdout
    assert "linear1/kernel: (64, 64), (64, 16) on each device" in run.stdout
    assert "all_reduces in the forward pass: 1" in run.stdout
