"""Calibration: measure the devices of this process and fit a cluster description to the results.

`autopar.microbenchmarks` defines the measurements, `simulator.calibration.fit_cluster` the fit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax

from autopar import microbenchmarks
from autopar.devices import cluster_of, device_mesh
from autopar.microbenchmarks import Benchmark
from simulator.calibration.fit_cluster import (
    Convolution,
    MeasuredDevice,
    Overlap,
    fit_cluster,
    fit_device,
)
from simulator.calibration.fit_collectives import MeasuredCollectives
from simulator.hardware.cluster import Cluster, Provenance
from simulator.work import CollectiveKind, Gemm

__all__ = ["BUDGET", "CPU", "GPU", "Effort", "Progress", "calibrate", "driver_version"]

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_DRIVER = Path("/sys/module/nvidia/version")

BUDGET = 240.0
"""Default limit on the seconds that measuring takes."""

type Progress = Callable[[str, float], None]
"""A callback that receives the next measurement in words, and the spent fraction of the budget."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes to measure, as far as the budget allows.

    Attributes:
        elements: sizes of the float32 arrays of elementwise kernels and collectives.
        rows: numbers of rows of matrix products (rows, width) by (width, width).
        widths: widths of these products.
        convolutions: sizes of 3 x 3 convolutions.
        dtypes: dtypes of products and convolutions.
        seconds: minimum duration of a measurement; each is repeated three times.
    """

    elements: tuple[int, ...] = tuple(4**i for i in range(6, 15))
    rows: tuple[int, ...] = (256, 1024, 4096)
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    convolutions: tuple[Convolution, ...] = (
        Convolution(32, 56, 64),
        Convolution(32, 28, 128),
        Convolution(32, 14, 256),
        Convolution(64, 28, 256),
        Convolution(16, 56, 256),
        Convolution(64, 14, 512),
    )
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    seconds: float = 0.05


GPU = Effort()
CPU = Effort(
    tuple(4**i for i in range(5, 12)),
    (64, 256),
    (128, 256, 512),
    (
        Convolution(4, 16, 32),
        Convolution(8, 16, 32),
        Convolution(4, 32, 32),
        Convolution(4, 16, 64),
    ),
    ("float32", "bfloat16"),
    0.02,
)


def calibrate(
    devices: Sequence[Any] | None = None,
    effort: Effort | None = None,
    progress: Progress = lambda what, spent: None,
    budget: float = BUDGET,
) -> Cluster:
    """Measure devices and return them as a cluster of one host.

    Memory size, peak rates of a GPU and links to other hosts are not measured. They are copied from
    the shipped file of the same kind of device, or, with a warning, of an A100. The machine should
    be idle.

    Args:
        devices: the devices to measure; all of this process by default.
        effort: the sizes to measure; by default `CPU` or `GPU`, by platform.
        progress: a callback that receives each measurement and the spent fraction of the budget.
        budget: limit on the seconds of measuring. A short budget measures fewer sizes, each for a
            shorter time. The minimum of sizes that the fit needs is measured in any case.

    Returns:
        The cluster, with `provenance` saying when and how it was measured.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget <= 0:
        raise ValueError(
            f"a budget of {budget} seconds; expected more than 0, {BUDGET:.0f} by default"
        )
    mesh = device_mesh(devices)
    measured_devices = list(mesh.devices.flat)
    platform = measured_devices[0].platform
    device_kind = measured_devices[0].device_kind
    base = cluster_of(mesh)
    clock = _BudgetClock(budget, progress)
    effort = effort or (CPU if platform == "cpu" else GPU)
    least = effort.seconds * min(1.0, budget / BUDGET)
    measured = _Measurements(measured_devices, effort, least, clock).run()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    source = (
        f"measured by autopar calibrate on {len(measured_devices)} x {device_kind}, {today},"
        f" jax {jax.__version__}"
    )
    device = fit_device(base.device, measured, f"{device_kind}, calibrated", source)
    provenance = Provenance(
        date=today,
        device_kind=device_kind,
        devices=len(measured_devices),
        driver=driver_version() if platform == "gpu" else None,
        jax=jax.__version__,
        jaxlib=version("jaxlib"),
        seconds=clock.spent,
        rows={},
    )
    return fit_cluster(base, device, measured, len(measured_devices), provenance)


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver on this machine, or None without one."""
    return _DRIVER.read_text().strip() if _DRIVER.exists() else None


class _BudgetClock:
    """A time budget whose fractions are assigned to one kind of measurement after the other."""

    def __init__(
        self, budget: float, progress: Progress, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.budget = budget
        self.progress = progress
        self.now = now
        self.start = now()

    @property
    def spent(self) -> float:
        """The seconds since the start."""
        return self.now() - self.start

    def announce(self, measurement: str) -> None:
        """Report the next measurement to the progress callback."""
        self.progress(measurement, min(1.0, self.spent / self.budget))

    def within[T](self, items: Sequence[T], until: float, least: int) -> Iterator[T]:
        """Yield items while there is time to measure another one.

        Args:
            items: sizes to measure; they are yielded in the order of `spread`, so that a truncated
                sequence still covers the whole range.
            until: fraction of the budget at which to stop.
            least: number of items to yield in any case.
        """
        longest = 0.0
        for number, item in enumerate(spread(items)):
            start = self.spent
            if number >= least and start + longest > until * self.budget:
                return
            yield item
            longest = max(longest, self.spent - start)


def spread[T](items: Sequence[T]) -> list[T]:
    """Return the items in order of bisection: both ends, the middle, the middles of the halves."""
    order = [0, len(items) - 1]
    gaps = [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            order.append((low + high) // 2)
            gaps += [(low, order[-1]), (order[-1], high)]
    return [items[i] for i in dict.fromkeys(order) if 0 <= i < len(items)]


@dataclass(frozen=True, slots=True)
class _Measurements:
    """Measures kernels and collectives on devices.

    Attributes:
        devices: the devices.
        effort: the sizes to measure.
        least: minimum duration of a measurement, in seconds.
        clock: the budget.
    """

    devices: Sequence[Any]
    effort: Effort
    least: float
    clock: _BudgetClock

    def run(self) -> MeasuredDevice:
        """Measure kernels on one device and, if there are several devices, collectives."""
        several = len(self.devices) > 1
        # fraction of the budget for kernels of a single device, of which products take half
        share = 0.4 if several else 0.9
        self.clock.announce("launches")
        launch = microbenchmarks.launch_seconds(self.devices[0], self.least)
        transfers = tuple(self._transfers(0.15 * share))
        products = {}
        convolutions = {}
        for number, dtype in enumerate(self.effort.dtypes, start=1):
            until = share * (0.15 + 0.85 * number / len(self.effort.dtypes))
            spent = self.clock.spent / self.clock.budget
            products[_HLO_DTYPES[dtype]] = tuple(
                self._products(dtype, spent + 0.6 * (until - spent))
            )
            convolutions[_HLO_DTYPES[dtype]] = tuple(self._convolutions(dtype, until))
        if not several:
            return MeasuredDevice(transfers, products, convolutions, launch=launch)
        overlaps = tuple(map(self._overlap, self.clock.within(self.effort.dtypes, 0.5, 1)))
        collectives: dict[CollectiveKind, MeasuredCollectives] = {}
        kinds = get_args(CollectiveKind)
        for number, kind in enumerate(kinds, start=1):
            collectives[kind] = self._collectives(kind, 0.5 + 0.5 * number / len(kinds))
        return MeasuredDevice(transfers, products, convolutions, collectives, overlaps, launch)

    def _transfers(self, until: float) -> Iterator[tuple[float, float]]:
        """Yield (bytes read and written, seconds) of elementwise kernels."""
        for size in self.clock.within(self.effort.elements, until, 4):
            self.clock.announce(f"elementwise, {size:,} elements")
            yield 8.0 * size, self._seconds(microbenchmarks.elementwise(self.devices[0], size))

    def _products(self, dtype: str, until: float) -> Iterator[tuple[Gemm, float]]:
        sizes = list(product(self.effort.rows, self.effort.widths))
        for rows, width in self.clock.within(sizes, until, 4):
            self.clock.announce(f"products, {dtype}, {rows} x {width} x {width}")
            benchmark = microbenchmarks.matrix_product(self.devices[0], dtype, rows, width)
            yield Gemm(rows, width, width), self._seconds(benchmark)

    def _convolutions(self, dtype: str, until: float) -> Iterator[tuple[Convolution, float]]:
        for sizes in self.clock.within(self.effort.convolutions, until, 2):
            self.clock.announce(
                f"convolutions, {dtype},"
                f" {sizes.batch} x {sizes.side} x {sizes.side} x {sizes.channels}"
            )
            benchmark = microbenchmarks.convolution(
                self.devices[0], dtype, sizes.batch, sizes.side, sizes.channels
            )
            yield sizes, self._seconds(benchmark)

    def _collectives(self, kind: CollectiveKind, until: float) -> MeasuredCollectives:
        count = len(self.devices)
        group_sizes = [size for size in (2, 4, 8, 16) if size < count] + [count]
        sizes = list(product(group_sizes, self.effort.elements))
        rows: list[tuple[int, float, float]] = []
        for size, elements in self.clock.within(sizes, until, 6):
            self.clock.announce(f"{kind}, {size} devices, {elements:,} elements")
            # rounded up to equal shards
            num_bytes = 4 * size * -(-elements // size)
            seconds = self._seconds(
                microbenchmarks.collective(kind, self.devices[:size], num_bytes)
            )
            rows.append((size, float(num_bytes), seconds))
        return MeasuredCollectives.of(kind, *zip(*sorted(rows), strict=True))

    def _overlap(self, dtype: str) -> Overlap:
        """Time products and an all_reduce of about equal duration, alone and in one program."""
        self.clock.announce(f"an all_reduce beside products, {dtype}")
        shard_elements = max(1, max(self.effort.elements) // len(self.devices))
        reduce = microbenchmarks.collective(
            "all_reduce", self.devices, 4 * len(self.devices) * shard_elements
        )
        multiply = microbenchmarks.matrix_product(
            None, dtype, self.effort.rows[-1], self.effort.widths[-1]
        )
        y = jax.tree.map(partial(microbenchmarks.copy_to_each, self.devices), multiply.x)

        def products(count: int) -> Benchmark:
            def kernel(y: Any) -> Any:
                for _ in range(count):
                    y = multiply.kernel(y)
                return y

            return Benchmark(microbenchmarks.run_on_all(self.devices, kernel), y)

        reduce_seconds = self._seconds(reduce)
        compute = products(max(1, min(64, round(reduce_seconds / self._seconds(products(1))))))
        both = Benchmark(
            lambda inputs: (reduce.kernel(inputs[0]), compute.kernel(inputs[1])),
            (reduce.x, compute.x),
        )
        return Overlap(self._seconds(compute), reduce_seconds, self._seconds(both))

    def _seconds(self, benchmark: Benchmark) -> float:
        return microbenchmarks.kernel_seconds(benchmark, self.least)
