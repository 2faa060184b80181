"""`benchmarks/conftest.py` records times as multiples of a reference and names what got slower."""

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

CONFTEST = """
import benchmarks.conftest
from benchmarks.conftest import *

benchmarks.conftest.reference_seconds = lambda: {reference}
"""
BENCHMARKS = """
import pytest

now = 0.0


@pytest.mark.parametrize("seconds", {seconds}.values(), ids={seconds})
@pytest.mark.benchmark(timer=lambda: now)
def test_work(benchmark, seconds):
    def work():
        global now
        now += seconds

    benchmark.pedantic(work, rounds=3)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run benchmarks that take the given seconds by a clock of their own, beside a reference."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)  # benchmarks are disabled in its workers

    def run(seconds: dict[str, float], reference: float, option: str) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST.format(reference=reference))
        pytester.makepyfile(BENCHMARKS.format(seconds=seconds))
        return pytester.runpytest_subprocess(f"--benchmark-{option}=baselines.json")

    return run


def baselines(path: Path) -> dict[str, float]:
    """Return the fastest round of each benchmark, in multiples of the reference."""
    recorded = json.loads(path.read_text())["benchmarks"]
    return {
        benchmark["fullname"].split("[")[1][:-1]: benchmark["stats"]["min"]
        for benchmark in recorded
    }


def test_only_a_benchmark_that_got_slower_than_the_reference_is_named(run):
    assert run({"equal": 1.0, "a bit": 1.0, "slower": 1.0}, 0.25, "json").ret == 0
    half_as_fast = run({"equal": 2.0, "a bit": 2.8, "slower": 3.2, "new": 1.0}, 0.5, "compare")
    assert half_as_fast.ret == 1
    assert "Traceback" not in half_as_fast.stdout.str() + half_as_fast.stderr.str()
    named = [line for line in half_as_fast.errlines if "has failed" in line]
    assert len(named) == 1
    assert "slower" in named[0]
    assert run({"equal": 2.0, "a bit": 2.8, "slower": 2.0}, 0.5, "compare").ret == 0


def test_baselines_are_the_fastest_of_several_runs(run, pytester):
    path = pytester.path / "baselines.json"
    run({"first": 1.0, "second": 1.0}, 0.25, "json")
    assert baselines(path) == {"first": 4.0, "second": 4.0}
    run({"second": 3.0, "third": 0.5}, 0.5, "json")
    assert baselines(path) == {"first": 4.0, "second": 4.0, "third": 1.0}
    run({"second": 1.0}, 0.5, "json")
    assert baselines(path) == {"first": 4.0, "second": 2.0, "third": 1.0}
