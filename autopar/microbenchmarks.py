"""Microbenchmarks of kernels, collectives and launches, for `autopar calibrate` and the sweep.

A kernel is repeated in a loop inside one program, on its own result, so that time on the host does
not count. Each iteration of the loop adds two small kernels on a GPU, and XLA launches the kernels
of an iteration as a CUDA graph only if there are enough; an iteration therefore contains many.
Products multiply random numbers, because zeros and ones draw less power than training data. Their
second factor is a reflection, which is orthogonal: repeated products neither grow nor vanish.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar import manual
from simulator.work import CollectiveKind

__all__ = [
    "AXIS",
    "Benchmark",
    "Kernel",
    "collective",
    "convolution",
    "copy_to_each",
    "elementwise",
    "kernel_seconds",
    "launch_seconds",
    "matrix_product",
    "repeated",
    "run_on_all",
]

type Kernel = Callable[[Any], Any]
"""A function whose result has the shapes and dtypes of its argument, so that it can be repeated."""

_KERNELS_PER_ITERATION = 32
"""Number of kernels in an iteration of the loop on a GPU; must be even (see `_chained`)."""

_BEYOND_CACHES = 1 << 28
"""Bytes, five times the second-level cache of an H100."""

AXIS = "x"
"""Name of the axis of the mesh on which collectives, and kernels on several devices, run."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A kernel with its first argument.

    Attributes:
        kernel: the function to repeat.
        x: its first argument, on the devices where it runs.
        count: number of measured operations in one call of the kernel.
    """

    kernel: Kernel
    x: Any
    count: int = 1


def elementwise(device: Any, size: int, parts: int | None = None) -> Benchmark:
    """Return a multiply-add of `size` float32 elements, each read and written once.

    Args:
        device: the device to run on.
        size: number of elements.
        parts: number of such arrays to cycle through, a power of two. By default one on a CPU, and
            on a GPU more than its caches hold, because a training step uses other arrays between
            two uses of the same one.
    """
    if parts is None:
        parts = max(1, _BEYOND_CACHES // (4 * size)) if _is_gpu(device) else 1
    if parts == 1:
        return Benchmark(
            lambda x: x * 0.999 + 0.001, jax.device_put(jnp.ones(size, jnp.float32), device)
        )
    count = min(parts, _KERNELS_PER_ITERATION)

    def kernel(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, first = state
        for number in range(count):
            part = jax.lax.dynamic_index_in_dim(x, first + number, keepdims=False)
            x = jax.lax.dynamic_update_index_in_dim(x, part * 0.999 + 0.001, first + number, 0)
        return x, (first + count) % parts

    start = jnp.ones((parts, size), jnp.float32), jnp.zeros((), jnp.int32)
    return Benchmark(kernel, jax.device_put(start, device), count)


def matrix_product(device: Any, dtype: str, rows: int, width: int) -> Benchmark:
    """Return a product of (rows, width) by (width, width), on JAX's default device if None."""
    return _chained(jnp.matmul, device, _random((rows, width), dtype), _reflection(width, dtype))


def convolution(device: Any, dtype: str, batch: int, side: int, channels: int) -> Benchmark:
    """Return a 3 x 3 convolution of (batch, side, side, channels) to as many channels."""
    convolve = partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    window = jnp.zeros((3, 3, channels, channels), dtype).at[1, 1].set(_reflection(channels, dtype))
    return _chained(convolve, device, _random((batch, side, side, channels), dtype), window)


def collective(kind: CollectiveKind, devices: Sequence[Any], num_bytes: int) -> Benchmark:
    """Return a collective over all devices.

    Args:
        kind: the kind of collective.
        devices: the devices.
        num_bytes: bytes of the whole array, which each device has, as in
            `simulator.work.Collective`.

    Raises:
        ValueError: the array cannot be split into equal float32 shards.
    """
    if num_bytes % (4 * len(devices)):
        raise ValueError(
            f"{num_bytes} bytes can't be split into float32 shards for {len(devices)} devices;"
            " use a multiple"
        )
    x = copy_to_each(devices, np.zeros(num_bytes // 4, np.float32))
    return Benchmark(run_on_all(devices, _COLLECTIVES[kind]), x)


def copy_to_each(devices: Sequence[Any], x: Any) -> jax.Array:
    """Return copies of an array, one on each device, as an array sharded along dim 0."""
    along = NamedSharding(_line_mesh(devices), PartitionSpec(AXIS))
    return jax.device_put(np.concatenate([np.asarray(x)] * len(devices)), along)


def run_on_all(devices: Sequence[Any], kernel: Kernel) -> Kernel:
    """Return a kernel that runs on each device, on its shard along dim 0."""
    along = PartitionSpec(AXIS)
    return jax.shard_map(kernel, mesh=_line_mesh(devices), in_specs=along, out_specs=along)


def repeated(benchmark: Benchmark) -> Callable[[Any, int], Any]:
    """Return a jitted function of (x, count) that calls the kernel `count` times in a loop.

    On GPUs each count compiles a program of its own: with a dynamic count, each iteration would
    wait for the host.
    """

    def loop(x: Any, count: int) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, x: benchmark.kernel(x), x)

    (platform,) = {
        device.platform for leaf in jax.tree.leaves(benchmark.x) for device in leaf.devices()
    }
    return jax.jit(loop, static_argnums=1 if platform == "gpu" else ())


def kernel_seconds(benchmark: Benchmark, least: float) -> float:
    """Return the seconds of one measured operation.

    The time of a loop with one iteration is subtracted from that of a long loop. Each loop runs
    three times and the fastest run counts, because disturbances only add time.

    Args:
        benchmark: the kernel.
        least: minimum seconds of the long loop.
    """
    loop = repeated(benchmark)

    def run(count: int) -> float:
        jax.block_until_ready(loop(benchmark.x, count))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(loop(benchmark.x, count))
            times.append(time.perf_counter() - start)
        return min(times)

    single = run(1)
    count = 16
    while (total := run(count)) < least:
        count *= max(2, min(64, round(least / total)))
    seconds = (total - single) / (count - 1) if total > single else total / count
    return seconds / benchmark.count


def launch_seconds(device: Any, least: float) -> float:
    """Return the seconds that the host takes to launch a program.

    Calls of a jitted function with next to no work are dispatched one after the other, without
    waiting for their results. The median of three runs of about `least` seconds counts.
    """
    call = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(call(jax.device_put(jnp.zeros(()), device)))

    def run(count: int) -> float:
        nonlocal x
        start = time.perf_counter()
        for _ in range(count):
            x = call(x)
        seconds = time.perf_counter() - start
        jax.block_until_ready(x)
        return seconds / count

    count = max(10, round(least / run(10)))
    return median(run(count) for _ in range(3))


def _chained(
    operation: Callable[[jax.Array, jax.Array], jax.Array], device: Any, x: jax.Array, w: jax.Array
) -> Benchmark:
    """Return a benchmark of `operation(x, w)`, repeated on its own result.

    The number of operations in an iteration is even, so that two buffers alternate and the last
    result is in the buffer of the first argument; with an odd number XLA would have to copy it.
    """
    count = _KERNELS_PER_ITERATION if _is_gpu(device) else 2

    def kernel(operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, w = operands
        for _ in range(count):
            x = operation(x, w)
        return x, w

    return Benchmark(kernel, jax.device_put((x, w), device), count)


def _is_gpu(device: Any) -> bool:
    return device is not None and device.platform == "gpu"


def _line_mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _random(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _reflection(width: int, dtype: str) -> jax.Array:
    """Return the Householder reflection of a random vector, an orthogonal matrix."""
    v = jax.random.normal(jax.random.key(1), (width,))
    return (jnp.eye(width) - 2 * jnp.outer(v, v) / (v @ v)).astype(dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    return manual.all_gather(x[: len(x) // jax.lax.axis_size(AXIS)], AXIS, dim=0)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, manual.reduce_scatter(x, AXIS, dim=0), (0,))


# the whole array in and out, so that repeated collectives have at most a slice in between
_COLLECTIVES: dict[CollectiveKind, Kernel] = {
    "all_reduce": lambda x: jax.lax.pcast(manual.all_reduce(x, AXIS), AXIS, to="varying"),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": partial(manual.all_to_all, axis=AXIS, split_dim=0, concat_dim=0),
    "collective_permute": partial(manual.shift, axis=AXIS),
}
