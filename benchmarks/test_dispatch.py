"""Seconds of a call of a parallelized step, beside `jax.jit` with the same shardings."""

import jax
import pytest

import autopar
from tests.steps import mlp_args, mlp_step

# Many small leaves: a call takes little more than its dispatch.
SIZES = (32,) * 30


@pytest.fixture(scope="module", params=[1, 8], ids=["1 device", "8 devices"])
def planned(request):
    parallel = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=request.param), donate_argnums=()
    )
    args = parallel.preshard_dynamic_args(*mlp_args(SIZES, batch_size=8))
    return parallel, args


def time_calls(benchmark, step, args):
    """Time calls once the first ones, which compile and allocate, are over."""
    benchmark.pedantic(
        lambda: jax.block_until_ready(step(*args)), rounds=100, iterations=5, warmup_rounds=5
    )


@pytest.mark.benchmark(group="dispatch")
def test_jit(benchmark, planned):
    parallel, args = planned
    executable = parallel.get_executable(*args)
    step = jax.jit(
        mlp_step, in_shardings=executable.in_shardings, out_shardings=executable.out_shardings
    )
    time_calls(benchmark, step, args)


@pytest.mark.benchmark(group="dispatch")
def test_parallelize(benchmark, planned):
    parallel, args = planned
    time_calls(benchmark, parallel, args)
