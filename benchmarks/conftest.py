"""Compare benchmarks with baselines that any machine can use: multiples of a reference computation.

The first command fails and names each benchmark whose fastest round takes more than `TOLERANCE`
longer than its baseline. `RECORD` records baselines. Smaller ones in the file stay, so repeat it to
record the minimum of several runs, and delete an entry that is to grow.

    uv run pytest benchmarks --benchmark-compare

The reference is timed right before and after each benchmark, on the machine as busy as it is then.
Recorded times are divided by the reference's. Baselines are multiplied by it before
pytest-benchmark compares, which therefore prints both in seconds of this machine.
"""

import json
import platform
from collections.abc import Generator
from importlib.metadata import version

import pytest
from pytest_benchmark.session import PerformanceRegression
from pytest_benchmark.utils import parse_compare_fail

from experiments.reference_computation import reference_seconds
from tests import conftest as tests_conftest
from tests.conftest import *  # noqa: F403

RECORD = "uv run pytest benchmarks --benchmark-json=benchmarks/baselines.json"
TOLERANCE = "min:50%"
TIMES = "min", "median", "mean"  # of a baseline: a comparison needs the first, a table all three
REST = dict.fromkeys(("max", "stddev", "iqr", "rounds", "iterations"), float("nan"))
BASELINES = pytest.StashKey[dict[str, dict]]()


def pytest_configure(config):
    tests_conftest.pytest_configure(config)
    if config.option.benchmark_compare is True:
        config.option.benchmark_compare = RECORD.rpartition("=")[2]
    if config.option.benchmark_compare and not config.option.benchmark_compare_fail:
        config.option.benchmark_compare_fail = [parse_compare_fail(TOLERANCE)]


@pytest.hookimpl(wrapper=True, specname="pytest_terminal_summary")
def pytest_end_at_a_regression() -> Generator[None]:
    """End with exit code 1 and without a traceback if a benchmark got slower."""
    try:
        yield
    except PerformanceRegression as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)


def pytest_benchmark_generate_machine_info():
    """Return the versions that times depend on; pytest-benchmark warns where baselines differ."""
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    return {"python": platform.python_version(), **versions}


def pytest_benchmark_compare_machine_info(config, compared_benchmark):
    baselines = compared_benchmark["benchmarks"]
    config.stash[BASELINES] = {baseline["fullname"]: baseline["stats"] for baseline in baselines}


@pytest.fixture(autouse=True)
def timed_reference(benchmark, request):
    """Time the reference beside a benchmark, and turn its baseline into seconds of this machine."""
    before = reference_seconds()
    yield
    benchmark.extra_info["reference_seconds"] = seconds = min(before, reference_seconds())
    if stats := request.config.stash.get(BASELINES, {}).get(benchmark.fullname):
        scaled = {name: stats[name] * seconds for name in TIMES}
        stats.update(REST, **scaled, ops=1 / scaled["mean"], outliers="")


def pytest_benchmark_update_json(config, output_json):
    """Keep names and times, as multiples of the reference's, and the baselines that are smaller."""
    path = config.option.benchmark_json
    recorded = json.loads(path.read_text())["benchmarks"] if path and path.exists() else []
    baselines = {baseline["fullname"]: baseline["stats"] for baseline in recorded}
    for benchmark in output_json["benchmarks"]:
        name, seconds = benchmark["fullname"], benchmark["extra_info"]["reference_seconds"]
        stats = {key: float(f"{benchmark['stats'][key] / seconds:.4g}") for key in TIMES}
        baselines[name] = min(stats, baselines.get(name, stats), key=lambda stats: stats["min"])
    output_json["benchmarks"] = [
        {"fullname": name, "stats": stats} for name, stats in sorted(baselines.items())
    ]
    output_json["commit_info"] = {}
    output_json["command"] = RECORD
