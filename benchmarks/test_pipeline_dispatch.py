"""What running a pipeline costs beside the programs of its stages, in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import autopar
from autopar.ir.spec import LogicalMesh, partition_spec
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.instructions import task_of
from autopar.planning.profiling import task_seconds
from autopar.runtime.transports import by_tiles, whole
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
    benchmark.extra_info["microseconds_per_instruction"] = (
        benchmark.stats.stats.median / count * 1e6
    )


@pytest.mark.benchmark(group="pipeline of four stages")
def test_a_step_beside_its_stages(benchmark):
    """`over_the_sum_of_its_tasks` is the time of a step over that of its tasks, each run by itself; below 1 where they overlap."""
    executable, args = executable_and_args(512, 2048)
    benchmark(lambda: jax.block_until_ready(executable(*args)))
    seconds = {task: task_seconds(each.function) for task, each in executable.tasks.items()}
    seconds = sum(
        seconds[task_of(each)] for _, each in walk(executable.program) if isinstance(each, Run)
    )
    benchmark.extra_info["over_the_sum_of_its_tasks"] = benchmark.stats.stats.median / seconds


@pytest.mark.benchmark(group="pipeline dispatch")
def test_live_buffers_return_to_the_baseline(benchmark):
    executable, args = executable_and_args(16, 16)
    jax.block_until_ready(executable(*args))
    before = len(jax.live_arrays())
    benchmark.pedantic(lambda: jax.block_until_ready(executable(*args)), rounds=20)
    benchmark.extra_info["live_arrays"] = (before, len(jax.live_arrays()))
    assert len(jax.live_arrays()) == before


TRANSFERS = {
    "rows to rows": ((2, (("x",), ())), (2, (("x",), ()))),
    "copies to copies": ((2, ((), ())), (2, ((), ()))),
    "rows to columns": ((2, (("x",), ())), (2, ((), ("x",)))),
    "rows to more rows": ((2, (("x",), ())), (4, (("x",), ()))),
    "columns to copies": ((4, ((), ("x",))), (2, ((), ()))),
}


@pytest.mark.benchmark(group="transports")
@pytest.mark.parametrize("transport", [whole, by_tiles])
@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_transfer(benchmark, transfer, width, transport):
    """A matrix of `width` x `width` floats from mesh to mesh, new each time: JAX keeps what it copied to the host."""
    (source_size, source_spec), (size, spec) = TRANSFERS[transfer]
    devices = np.array(jax.devices())
    source, to = Mesh(devices[:source_size], ("x",)), Mesh(devices[4 : 4 + size], ("x",))
    meshes = (
        (LogicalMesh((source_size,), ("x",)), source_spec),
        (LogicalMesh((size,), ("x",)), spec),
    )
    plan = reshard((width, width), *meshes)
    move = transport(plan, jax.ShapeDtypeStruct((width, width), jnp.float32), source, to)
    value = jax.device_put(
        np.ones((width, width), np.float32), NamedSharding(source, partition_spec(source_spec))
    )
    renew = jax.jit(jnp.copy)

    def carry(value):
        sent = move.send(value)
        return jax.block_until_ready(sent if move.complete is None else move.complete(sent))

    benchmark.pedantic(
        carry,
        setup=lambda: ((jax.block_until_ready(renew(value)),), {}),
        rounds=100,
        warmup_rounds=3,
    )
    benchmark.extra_info["bytes_between_meshes"] = plan.sent_bytes(4)
