"""Seconds of running a pipeline in one process, beside those of the programs of its stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import autopar
from autopar.ir.spec import partition_spec
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Delivery, StageMesh
from autopar.planning.profiling import task_seconds
from autopar.runtime.carriers import PieceCarrier, WholeCarrier
from simulator.program import Run, walk
from tests.autopar.pipeline.stack_steps import pipeline, stack_batch, stack_params, stack_step


def executable_and_args(width: int, rows: int):
    """Return a pipeline of four stages on a device each, and its sharded arguments."""
    parallel = autopar.parallelize(stack_step, method=pipeline(devices=4), donate_argnums=())
    args = stack_params(width=width), stack_batch(rows, width)
    executable = parallel.get_executable(*args)
    return executable, executable.shard_args(*args)


@pytest.mark.benchmark(group="pipeline dispatch")
def test_instructions(benchmark):
    """Time tiny tasks, whose step takes little more than its dispatch.

    `microseconds_per_instruction` is the step's time over its instructions.
    """
    executable, args = executable_and_args(16, 16)
    benchmark(lambda: jax.block_until_ready(executable(*args)))
    count = sum(1 for _ in walk(executable.program))
    benchmark.extra_info["instructions"] = count
    benchmark.extra_info["microseconds_per_instruction"] = (
        benchmark.stats.stats.median / count * 1e6
    )


@pytest.mark.benchmark(group="pipeline of four stages")
def test_a_step_beside_its_stages(benchmark):
    """Report the step's time over that of its tasks, each run by itself.

    `over_the_sum_of_its_tasks` is below 1 where tasks overlap.
    """
    executable, args = executable_and_args(512, 2048)
    benchmark(lambda: jax.block_until_ready(executable(*args)))
    seconds = {name: task_seconds(task.function) for name, task in executable.tasks.items()}
    runs = [
        instruction for _, instruction in walk(executable.program) if isinstance(instruction, Run)
    ]
    sum_of_tasks = sum(seconds[task_of(run)] for run in runs)
    benchmark.extra_info["over_the_sum_of_its_tasks"] = benchmark.stats.stats.median / sum_of_tasks


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


@pytest.mark.benchmark(group="carriers")
@pytest.mark.parametrize("carrier", [WholeCarrier, PieceCarrier], ids=["whole", "pieces"])
@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_transfer(benchmark, transfer, width, carrier):
    """Send a matrix of `width` x `width` floats from mesh to mesh.

    Each round sends a new array, because JAX keeps what it copied to the host.
    """
    (source_size, source_spec), (size, spec) = TRANSFERS[transfer]
    devices = dict(enumerate(jax.devices()))
    source = StageMesh(tuple(range(source_size)), (source_size,), ("x",))
    to = StageMesh(tuple(range(4, 4 + size)), (size,), ("x",))
    plan = reshard((width, width), (source.logical, source_spec), (to.logical, spec))
    prepared = carrier(Delivery(0, plan, np.dtype(np.float32), source, to), devices)
    sharding = NamedSharding(source.on(devices), partition_spec(source_spec))
    value = jax.device_put(np.ones((width, width), np.float32), sharding)
    renew = jax.jit(jnp.copy)

    def carry(value):
        prepared.send(value, tag=0, is_used_up=False)
        return jax.block_until_ready(prepared.receive(tag=0))

    benchmark.pedantic(
        carry,
        setup=lambda: ((jax.block_until_ready(renew(value)),), {}),
        rounds=100,
        warmup_rounds=3,
    )
    benchmark.extra_info["bytes_between_meshes"] = plan.sent_bytes(4)
