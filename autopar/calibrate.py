"""Measures the devices that are here and describes them as a cluster file: `autopar calibrate`.

Kernels are repeated in a loop inside one program, each on the result of the one before, so that what the host does does not count.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.devices import cluster_of, device_mesh
from simulator.calibration.collectives import MeasuredCollectives
from simulator.calibration.devices import MeasuredDevice, Overlap, fit_cluster, fit_device
from simulator.cluster import Cluster
from simulator.work import Gemm

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured.

    Attributes:
        elements: of f32 arrays that elementwise kernels and all_reduces go over.
        rows, widths: of products (rows, width) by (width, width).
        dtypes: of products.
        seconds: how long a measurement takes at least, three of which are made.
    """

    elements: tuple[int, ...] = tuple(4**i for i in range(6, 14))
    rows: tuple[int, ...] = (256, 1024, 4096)
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    seconds: float = 0.05


GPU = Effort()
CPU = Effort(tuple(4**i for i in range(5, 12)), (64, 256), (128, 256, 512), ("float32", "bfloat16"), 0.02)


def calibrate(
    devices: Sequence[Any] | None = None,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Cluster:
    """The devices, all of this process by default, as a cluster of one host whose numbers were measured just now.

    What a minute or two on an idle machine can't tell (memory size, peaks of a GPU, links to other hosts) is as in the shipped file of
    the same kind of device, or of an A100, with a warning.
    """
    mesh = device_mesh(devices)
    here = list(mesh.devices.flat)
    effort = effort or (CPU if here[0].platform == "cpu" else GPU)
    base = cluster_of(mesh)
    measured = MeasuredDevice(
        tuple(_transfers(here[0], effort, progress)),
        {_HLO_DTYPES[dtype]: tuple(_products(here[0], dtype, effort, progress)) for dtype in effort.dtypes},
        _all_reduces(here, effort, progress) if len(here) > 1 else None,
        _overlap(here, effort, progress) if len(here) > 1 else None,
    )
    source = f"measured by autopar calibrate on {len(here)} x {here[0].device_kind}, {datetime.now(UTC):%Y-%m-%d}, jax {jax.__version__}"
    device = fit_device(base.device, measured, f"{here[0].device_kind}, calibrated", source)
    return fit_cluster(base, device, measured, len(here))


def _transfers(device: Any, effort: Effort, progress: Callable[[str], None]) -> Iterator[tuple[float, float]]:
    for size in effort.elements:
        progress(f"elementwise, {size:,} elements")
        x = jax.device_put(jnp.ones(size, jnp.float32), device)
        yield 8.0 * size, _seconds(lambda x: x * 0.999 + 0.001, x, effort)


def _products(device: Any, dtype: str, effort: Effort, progress: Callable[[str], None]) -> Iterator[tuple[Gemm, float]]:
    for rows, width in product(effort.rows, effort.widths):
        progress(f"products, {dtype}, {rows} x {width} x {width}")
        x = jax.device_put(jnp.ones((rows, width), dtype), device)
        w = jax.device_put(jnp.full((width, width), 1 / width, dtype), device)
        yield Gemm(rows, width, width), _seconds(lambda x, w=w: x @ w, x, effort)


def _all_reduces(devices: Sequence[Any], effort: Effort, progress: Callable[[str], None]) -> MeasuredCollectives:
    rows: list[tuple[int, float, float]] = []
    counts = [count for count in (2, 4, 8, 16) if count < len(devices)] + [len(devices)]
    for count, size in product(counts, effort.elements):
        progress(f"all_reduce, {count} devices, {size:,} elements")
        x = _on_each(devices[:count], (size,))
        rows.append((count, 4.0 * size, _seconds(_on_all(devices[:count], _mean), x, effort)))
    return MeasuredCollectives.of("all_reduce", *zip(*rows, strict=True))


def _overlap(devices: Sequence[Any], effort: Effort, progress: Callable[[str], None]) -> Overlap:
    """Products and an all_reduce that take about as long, by themselves and in one program."""
    width, x = effort.widths[-1], _on_each(devices, (effort.elements[-1],))
    y = _on_each(devices, (effort.rows[-1], width))

    def products(y: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            y = y @ jnp.full((width, width), 1 / width)
        return y

    progress("an all_reduce beside products")
    moved = _seconds(_on_all(devices, _mean), x, effort)
    one = _seconds(_on_all(devices, partial(products, count=1)), y, effort)
    count = max(1, min(64, round(moved / one)))
    computed = _seconds(_on_all(devices, partial(products, count=count)), y, effort)
    both = _on_all(devices, lambda each: (_mean(each[0]), products(each[1], count)))
    return Overlap(computed, moved, _seconds(both, (x, y), effort))


def _on_each(devices: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """Ones of a shape on each of the devices."""
    across = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    return jax.device_put(jnp.ones((len(devices), *shape), jnp.float32), across)


def _on_all(devices: Sequence[Any], kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The kernel on what each of the devices has."""
    spec = PartitionSpec("x")
    return jax.shard_map(kernel, mesh=Mesh(np.array(devices), ("x",)), in_specs=spec, out_specs=spec)


def _mean(x: jax.Array) -> jax.Array:
    return jax.lax.pcast(jax.lax.pmean(x, "x"), "x", to="varying")


def _seconds(kernel: Callable[[Any], Any], x: Any, effort: Effort) -> float:
    """Seconds of one kernel: so many in a row that they take long enough, less a row of one."""

    @partial(jax.jit, static_argnums=1)
    def row(x: Any, count: int) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, x: kernel(x), x)

    def run(count: int) -> float:
        jax.block_until_ready(row(x, count))
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(row(x, count))
            times.append(time.perf_counter() - begin)
        return median(times)

    count, single = 16, run(1)
    while (together := run(count)) < effort.seconds:
        count *= max(2, min(64, round(effort.seconds / together)))
    return max(1e-9, (together - single) / (count - 1))
