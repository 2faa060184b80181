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
