"""Eight virtual CPU devices stand in for eight GPUs, but in the tests for one; set before JAX starts."""

import os

os.environ["PYTHONDONTWRITEBYTECODE"] = (
    ""  # the many processes that tests start import compiled modules
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",  # most of the time is XLA's compilation
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # on a busy machine a device may come late to a collective
])  # fmt: skip

import pytest
from hypothesis import settings

from tests.fuzz.outcomes import as_table

settings.register_profile(
    "autopar", max_examples=40, deadline=None, derandomize=True
)  # shared machines are slow, and tests repeatable
settings.load_profile("autopar")


def pytest_configure(config):
    """`-m gpu` leaves JAX the GPUs that are here. What is compiled is kept in pytest's cache, for other tests, processes and runs:
    `--cache-clear` removes it."""
    if config.option.markexpr == "gpu":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    if (cache := getattr(config, "cache", None)) is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("xla"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_terminal_summary(terminalreporter):
    """Print what fuzz tests counted (`tests.fuzz.outcomes`): a line for each kind of input, a column for each outcome."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [
        each
        for report in reports
        if getattr(report, "when", "") == "call"
        for each in report.user_properties
    ]
    counts = {
        name[len("outcomes of ") :]: found
        for name, found in properties
        if name.startswith("outcomes of ")
    }
    if counts:
        terminalreporter.section("outcomes of fuzzed inputs")
        for line in as_table(counts):
            terminalreporter.write_line(line)


WITH_RAY = "tests/autopar/hosts/", "tests/experiments/test_chaos.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, the tests of a file run in one process, which compiles what they share once; those with Ray all in one, and
    fuzz tests, which share nothing, wherever there is room."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/fuzz/"):
                return nodeid
            return "ray" if nodeid.startswith(WITH_RAY) else super()._split_scope(nodeid)

    return ByFile(config, log)
