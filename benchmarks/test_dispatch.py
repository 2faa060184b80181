"""What a call of a parallelized step costs beside the same step under `jax.jit` with the same shardings."""

import jax
import pytest

import autopar
from tests.steps import mlp_args, mlp_step

SIZES = (32,) * 30  # many small leaves: dispatch is all there is to measure


@pytest.fixture(scope="module", params=[1, 8], ids=["1 device", "8 devices"])
def planned(request):
    parallel = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=request.param), donate_argnums=()
    )
    args = parallel.preshard_dynamic_args(*mlp_args(SIZES, batch_size=8))
    return parallel, args


@pytest.mark.benchmark(group="dispatch")
def test_jit(benchmark, planned):
    parallel, args = planned
    executable = parallel.get_executable(*args)
    step = jax.jit(
        mlp_step, in_shardings=executable.in_shardings, out_shardings=executable.out_shardings
    )
    benchmark(lambda: jax.block_until_ready(step(*args)))


@pytest.mark.benchmark(group="dispatch")
def test_parallelize(benchmark, planned):
    parallel, args = planned
    benchmark(lambda: jax.block_until_ready(parallel(*args)))
