"""Kernels, collectives and launches to time one by one: what `autopar calibrate` and the sweep's table of collectives measure.

A kernel is repeated in a loop inside one program, each time on the result of the time before, so that what the host does does not
count. A turn of the loop costs a GPU two small kernels of its own, and kernels of which there are few in a turn are started one by one
rather than as a graph, so that a turn holds many. What is multiplied are random numbers, as zeros and ones take less power than what is
trained on; the second factor is a reflection, so that results stay as large as they are however often.
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

type Kernel = Callable[[Any], Any]
"""What leaves a value of the shapes and dtypes that it takes, so that it can be repeated."""

_KERNELS_IN_A_TURN = 32
"""On a GPU; an even number."""

_MORE_THAN_CACHES = 1 << 28
"""Bytes, five times the second-level cache of an H100."""

AXIS = "x"
"""Of the mesh that collectives and kernels on several devices run on."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A kernel, and what it starts from.

    Attributes:
        count: how often the kernel does what is measured.
    """

    kernel: Kernel
    x: Any
    count: int = 1


def elementwise(device: Any, size: int, parts: int | None = None) -> Benchmark:
    """A multiply-add of so many f32, which are read and written once.

    Args:
        parts: how many such arrays to go over in turn, a power of two. By default one on a CPU, and on a GPU as many as its caches
            don't hold: between two uses of an array a training step uses others.
    """
    if parts is None:
        parts = max(1, _MORE_THAN_CACHES // (4 * size)) if _is_gpu(device) else 1
    if parts == 1:
        return Benchmark(
            lambda x: x * 0.999 + 0.001, jax.device_put(jnp.ones(size, jnp.float32), device)
        )
    in_a_turn = min(parts, _KERNELS_IN_A_TURN)

    def kernel(of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, first = of
        for number in range(in_a_turn):
            part = jax.lax.dynamic_index_in_dim(x, first + number, keepdims=False)
            x = jax.lax.dynamic_update_index_in_dim(x, part * 0.999 + 0.001, first + number, 0)
        return x, (first + in_a_turn) % parts

    start = jnp.ones((parts, size), jnp.float32), jnp.zeros((), jnp.int32)
    return Benchmark(kernel, jax.device_put(start, device), in_a_turn)


def matrix_product(device: Any, dtype: str, rows: int, width: int) -> Benchmark:
    """(rows, width) by (width, width); on no device in particular if that is None."""
    return _in_a_row(jnp.matmul, device, _random((rows, width), dtype), _reflection(width, dtype))


def convolution(device: Any, dtype: str, batch: int, side: int, channels: int) -> Benchmark:
    """Of 3 x 3, over a batch of square images, as many channels out as in."""
    convolve = partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    window = jnp.zeros((3, 3, channels, channels), dtype).at[1, 1].set(_reflection(channels, dtype))
    return _in_a_row(convolve, device, _random((batch, side, side, channels), dtype), window)


def collective(kind: CollectiveKind, devices: Sequence[Any], num_bytes: int) -> Benchmark:
    """A collective between devices, each of which has the whole array of `num_bytes`, as in `simulator.work.Collective`."""
    if num_bytes % (4 * len(devices)):
        raise ValueError(
            f"{num_bytes} bytes can't be split into float32 shards for {len(devices)} devices; use a multiple"
        )
    return Benchmark(
        on_all(devices, _ONCE[kind]), on_each(devices, np.zeros(num_bytes // 4, np.float32))
    )


def on_each(devices: Sequence[Any], x: Any) -> jax.Array:
    """A copy of an array on each of the devices, one after the other along dim 0."""
    along = NamedSharding(_line(devices), PartitionSpec(AXIS))
    return jax.device_put(np.concatenate([np.asarray(x)] * len(devices)), along)


def on_all(devices: Sequence[Any], kernel: Kernel) -> Kernel:
    """The kernel on what each of the devices has."""
    along = PartitionSpec(AXIS)
    return jax.shard_map(kernel, mesh=_line(devices), in_specs=along, out_specs=along)


def repeated(benchmark: Benchmark) -> Callable[[Any, int], Any]:
    """One program of so many of a kernel, on a value and that number. GPUs compile one for each number: else each turn waits for the host."""

    def row(x: Any, count: int) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, x: benchmark.kernel(x), x)

    (platform,) = {
        device.platform for leaf in jax.tree.leaves(benchmark.x) for device in leaf.devices()
    }
    return jax.jit(row, static_argnums=1 if platform == "gpu" else ())


def kernel_seconds(benchmark: Benchmark, least: float) -> float:
    """Seconds of what is measured: so many kernels in a row that they take `least` seconds, less a row of one.

    The fastest of three rows counts: whatever disturbs one only adds to it.
    """
    row = repeated(benchmark)

    def run(count: int) -> float:
        jax.block_until_ready(row(benchmark.x, count))
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(row(benchmark.x, count))
            times.append(time.perf_counter() - begin)
        return min(times)

    count, single = 16, run(1)
    while (together := run(count)) < least:
        count *= max(2, min(64, round(least / together)))
    each = (together - single) / (count - 1) if together > single else together / count
    return each / benchmark.count


def launch_seconds(device: Any, least: float) -> float:
    """Seconds that the host takes to start a program: jitted calls one after the other that do next to nothing, and nobody waits."""
    call = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(call(jax.device_put(jnp.zeros(()), device)))

    def run(count: int) -> float:
        nonlocal x
        begin = time.perf_counter()
        for _ in range(count):
            x = call(x)
        seconds = time.perf_counter() - begin
        jax.block_until_ready(x)
        return seconds / count

    count = max(10, round(least / run(10)))
    return median(run(count) for _ in range(3))


def _in_a_row(
    operation: Callable[[jax.Array, jax.Array], jax.Array], device: Any, x: jax.Array, w: jax.Array
) -> Benchmark:
    """Operations, each on the result of the one before, and an even number of them: the last result takes the place of what they started
    from, where a single one would have to be copied."""
    count = _KERNELS_IN_A_TURN if _is_gpu(device) else 2

    def kernel(of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, w = of
        for _ in range(count):
            x = operation(x, w)
        return x, w

    return Benchmark(kernel, jax.device_put((x, w), device), count)


def _is_gpu(device: Any) -> bool:
    return device is not None and device.platform == "gpu"


def _line(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _random(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _reflection(width: int, dtype: str) -> jax.Array:
    """What maps a random vector to its opposite, and what is orthogonal to it to itself."""
    v = jax.random.normal(jax.random.key(1), (width,))
    return (jnp.eye(width) - 2 * jnp.outer(v, v) / (v @ v)).astype(dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    return manual.all_gather(x[: len(x) // jax.lax.axis_size(AXIS)], AXIS, dim=0)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, manual.reduce_scatter(x, AXIS, dim=0), (0,))


# Each takes and leaves the whole array, so that one can follow on the other with nothing but a slice in between.
_ONCE: dict[CollectiveKind, Kernel] = {
    "all_reduce": lambda x: jax.lax.pcast(manual.all_reduce(x, AXIS), AXIS, to="varying"),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": partial(manual.all_to_all, axis=AXIS, split_dim=0, concat_dim=0),
    "collective_permute": partial(manual.shift, axis=AXIS),
}
