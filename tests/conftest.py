"""Set up JAX for tests: eight virtual CPU devices stand in for GPUs, except under `-m gpu`.

JAX reads these variables when it starts, so they are set before anything imports it.

`autopar/x/y.py` is tested by `tests/autopar/x/test_y.py`, `simulator/x/y.py` by
`tests/simulator/test_y.py`. Tests share these modules:

- `models`: Flax models. `steps`: training steps, their arguments, comparisons with one device.
- `tiers`: which combinations of parameters are fast and which slow tests.
- `generators`: Hypothesis strategies of meshes and selection problems.
- `autopar.checks.compiled_plans`: plans by bandwidth alone, and the collectives of compiled ones.
- `autopar.directives.scheduled_models`: schedules of models, and the collectives that they have.
- `autopar.hosts.workers`: workers on a Ray cluster of this machine.
- `autopar.microbatch.batch_losses`: losses by what microbatches have to know of the whole batch.
- `autopar.pipeline.stack_steps`: a step with pipeline boundaries, and pipelines.
- `autopar.recompute.dropout_mlp`: layers with dropout, their loss and arguments.
- `autopar.report.planned_steps`: traced steps and their plans, cached by name.
- `autopar.sharding.equation_cases`: equations of every primitive; `shard_by_shard` evaluates their
  shardings device by device, `split_by_xla` by XLA's partitioner.
- `autopar.sharding.flax_steps`: training steps with common models and optimizers.
- `fuzz.outcomes`: counts of what became of random inputs.
- `fuzz.random_steps`: random training steps, of `fuzz.random_operations`. `fuzz.eager_tasks` runs
  them without compilation.
- `simulator.bodies`: task bodies, cost models and strategies of programs.
- `simulator.toy_clusters`: clusters whose collectives have seconds that follow by hand.
- `golden/` and `simulator/data/`: expected outputs, and compiled HLO.
"""

import gc
import os

# the many processes that tests start import compiled modules
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    # most of the time of tests is XLA's compilation
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    # the emitters that go through MLIR and a split into many LLVM modules double it
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
    # on a busy machine a device may reach a collective late
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
])  # fmt: skip

import pytest
from hypothesis import settings

from tests.fuzz.outcomes import as_table

# no deadline because shared machines are slow; derandomized so that failures can be repeated
settings.register_profile("autopar", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("autopar")
# a tenth of the time of tests was the search for cycles among the objects of traced programs
gc.set_threshold(100_000, 20, 20)


def pytest_configure(config):
    """Give JAX the GPUs under `-m gpu`, and keep compiled programs in pytest's cache.

    Other tests, processes and runs read them from there; `--cache-clear` removes them.
    """
    if config.option.markexpr == "gpu":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    if (cache := getattr(config, "cache", None)) is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.mkdir("xla"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_terminal_summary(terminalreporter):
    """Print the counts of fuzz tests: a line per kind of input, a column per outcome."""
    prefix = "outcomes of "
    counts = {
        name.removeprefix(prefix): outcomes
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, outcomes in report.user_properties
        if name.startswith(prefix)
    }
    if counts:
        terminalreporter.section("outcomes of fuzzed inputs")
        for line in as_table(counts):
            terminalreporter.write_line(line)


WITH_RAY = "tests/autopar/hosts/", "tests/experiments/test_chaos.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute tests under `-n`: those of a file run in one process, all tests with Ray in one.

    Tests of a file share compiled programs. Fuzz tests share nothing and run in any process.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/fuzz/"):
                return nodeid
            return "ray" if nodeid.startswith(WITH_RAY) else super()._split_scope(nodeid)

    return ByFile(config, log)
