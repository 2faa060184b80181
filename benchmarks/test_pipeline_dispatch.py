"""What running a pipeline costs beside the programs of its stages, in one process."""

import jax
import pytest

import autopar
from simulator.program import Run, walk
from tests.autopar.pipeline.steps import pipeline, stack_batch, stack_params, stack_step


def executable_and_args(width: int, rows: int):
    """A pipeline of four stages on a device each, and arguments in their places."""
    parallel = autopar.parallelize(stack_step, method=pipeline(devices=4), donate_argnums=())
    args = stack_params(width=width), stack_batch(rows, width)
    executable = parallel.get_executable(*args)
    return executable, executable.shard_args(*args)


@pytest.mark.benchmark(group="pipeline dispatch")
def test_instructions(benchmark):
    """Tiny tasks, so that dispatch is all there is to measure: `microseconds_per_instruction` of the step."""
    executable, args = executable_and_args(16, 16)
    benchmark(lambda: jax.block_until_ready(executable(*args)))
    count = sum(1 for _ in walk(executable.program))
    benchmark.extra_info["instructions"] = count
    benchmark.extra_info["microseconds_per_instruction"] = benchmark.stats.stats.median / count * 1e6


@pytest.mark.benchmark(group="pipeline of four stages")
def test_a_step_beside_its_stages(benchmark):
    """`over_the_sum_of_its_tasks` is the time of a step over that of its tasks, each run by itself; below 1 where they overlap."""
    executable, args = executable_and_args(512, 2048)
    benchmark(lambda: jax.block_until_ready(executable(*args)))
    values = executable.start(jax.tree.leaves(args))
    seconds = 0.0
    timer = jax.block_until_ready
    for mesh, instruction in walk(executable.program):
        if isinstance(instruction, Run):
            seconds += autopar.util.benchmark_func(
                lambda m=mesh, i=instruction: executable.execute(m, i, values),
                lambda: timer([each for row in values for each in row.values() if not each.is_deleted()]),
                warmup=1,
                repeat=1,
                number=1,
            )[0]
        else:
            executable.execute(mesh, instruction, values)
    benchmark.extra_info["over_the_sum_of_its_tasks"] = benchmark.stats.stats.median / seconds


@pytest.mark.benchmark(group="pipeline dispatch")
def test_live_buffers_return_to_the_baseline(benchmark):
    executable, args = executable_and_args(16, 16)
    jax.block_until_ready(executable(*args))
    before = len(jax.live_arrays())
    benchmark.pedantic(lambda: jax.block_until_ready(executable(*args)), rounds=20)
    benchmark.extra_info["live_arrays"] = (before, len(jax.live_arrays()))
    assert len(jax.live_arrays()) == before
