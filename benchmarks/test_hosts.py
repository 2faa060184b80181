"""Seconds of a step over Ray and in one process, and of transfers between hosts."""

import jax
import pytest

import autopar
from autopar.host_benchmarks import transfer_chain
from autopar.hosts import session
from autopar.testing import raylets
from experiments.measurements.host_timing import start_hosts
from tests.autopar.pipeline.stack_steps import pipeline, stack_batch, stack_params, stack_step

# Raylets are started by a fork, which executes another program immediately.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")

ARGS = stack_params(width=256), stack_batch(256, 256)
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def hosts():
    pytest.importorskip("ray")
    with raylets(2):
        start_hosts((2, 4))
        yield session.hosts()


def planned_step() -> autopar.ParallelizedFunction:
    """Return a step of four stages on eight virtual devices."""
    plan = autopar.plan_step(
        stack_step, ARGS, method=pipeline(devices=8), cluster="cpu-virtual", mesh_shape=(8,)
    )
    return autopar.parallelize(stack_step, method=autopar.PlanMethod(plan), donate_argnums=())


@pytest.mark.benchmark(group="step of four stages")
def test_a_step_in_one_process(benchmark):
    assert session.hosts() is None
    step = planned_step()
    args = step.preshard_dynamic_args(*ARGS)
    benchmark(lambda: jax.block_until_ready(step(*args)))


@pytest.mark.benchmark(group="step of four stages")
def test_a_step_over_ray(benchmark, hosts):
    step = planned_step()
    args = step.preshard_dynamic_args(*ARGS)

    def run() -> None:
        step(*args)
        hosts.wait()

    benchmark(run)


@pytest.mark.benchmark(group="transfers between hosts")
def test_a_megabyte_there_and_back_eight_times(benchmark, hosts):
    """Report the bandwidth of the transfers as `gb_per_s`."""
    chain = transfer_chain((0, 4), MEGABYTE, 8)
    benchmark(chain)
    benchmark.extra_info["gb_per_s"] = 16 * MEGABYTE / benchmark.stats.stats.median / 1e9
