import os
import re
import subprocess
import sys


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
