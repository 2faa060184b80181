"""Training survives the kills of `chaos train`, and orphaned processes are noticed."""

import subprocess
import sys
import time

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")

PARENT = """
import subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
input()
"""


def test_processes_whose_parents_are_gone_are_still_found():
    from experiments.chaos import _descendants

    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert {parent.pid, child} <= {each.pid for each in _descendants()}
    parent.kill()
    parent.wait()
    for pipe in (parent.stdin, parent.stdout):
        assert pipe is not None
        pipe.close()
    assert child not in {each.pid for each in psutil.Process().children(recursive=True)}
    assert child in {each.pid for each in _descendants()}
    psutil.Process(child).kill()
    end = time.monotonic() + 20
    while child in {each.pid for each in _descendants()} and time.monotonic() < end:
        time.sleep(0.02)
    assert not {parent.pid, child} & {each.pid for each in _descendants()}


@pytest.mark.slow
def test_a_short_run_in_which_workers_are_killed_ends_as_an_undisturbed_one():
    flags = ["--steps", "9", "--kills", "1", "--save-every", "3", "--devices", "1", "--seed", "7"]
    command = [sys.executable, "-W", "ignore", "-m", "experiments.chaos", "train", *flags]
    run = subprocess.run(command, text=True, capture_output=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "9 steps, 1 of 1 kills" in run.stdout
    assert "largest difference of a parameter: 0\n" in run.stdout
