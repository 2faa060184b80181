"""Measures the devices that are here and describes them as a cluster file: `autopar calibrate`.

What is measured is in `autopar.microbenchmarks`, how it becomes a description in `simulator.calibration.fit_cluster`.
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

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_DRIVER = Path("/sys/module/nvidia/version")

BUDGET = 240.0
"""Seconds that measuring takes at most, by default."""

type Progress = Callable[[str, float], None]
"""Told of what is measured next, and which part of the budget is spent."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, if there is time for all of it.

    Attributes:
        elements: of f32 arrays that elementwise kernels and collectives go over.
        rows, widths: of products (rows, width) by (width, width).
        convolutions: of 3 x 3.
        dtypes: of products and convolutions.
        seconds: how long a measurement takes at least, three of which are made.
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
    """The devices, all of this process by default, as a cluster of one host whose numbers were measured just now.

    What a few minutes on an idle machine can't tell (memory size, peaks of a GPU, links to other hosts) is as in the shipped file of
    the same kind of device, or of an A100, with a warning.

    Args:
        budget: seconds in which to measure. Where they are short, fewer sizes are measured, each for a shorter time; what it takes to
            fit the description at all is measured in any case.
    """
    if budget <= 0:
        raise ValueError(
            f"a budget of {budget} seconds; expected more than 0, {BUDGET:.0f} by default"
        )
    mesh = device_mesh(devices)
    here = list(mesh.devices.flat)
    base = cluster_of(mesh)
    clock = _Clock(budget, progress)
    effort = effort or (CPU if here[0].platform == "cpu" else GPU)
    measured = _Measuring(here, effort, effort.seconds * min(1.0, budget / BUDGET), clock).device()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    source = f"measured by autopar calibrate on {len(here)} x {here[0].device_kind}, {today}, jax {jax.__version__}"
    device = fit_device(base.device, measured, f"{here[0].device_kind}, calibrated", source)
    provenance = Provenance(
        date=today,
        device_kind=here[0].device_kind,
        devices=len(here),
        driver=driver_version() if here[0].platform == "gpu" else None,
        jax=jax.__version__,
        jaxlib=version("jaxlib"),
        seconds=clock.spent,
        rows={},
    )
    return fit_cluster(base, device, measured, len(here), provenance)


def driver_version() -> str | None:
    """The version of NVIDIA's driver on this machine, where it has one."""
    return _DRIVER.read_text().strip() if _DRIVER.exists() else None


class _Clock:
    """Seconds of a budget, parts of which are given to one kind of measurement after the other."""

    def __init__(
        self, budget: float, progress: Progress, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.budget, self.progress, self.now = budget, progress, now
        self.begun = now()

    @property
    def spent(self) -> float:
        return self.now() - self.begun

    def tell(self, what: str) -> None:
        self.progress(what, min(1.0, self.spent / self.budget))

    def within[T](self, items: Sequence[T], until: float, least: int) -> Iterator[T]:
        """Of the items those that there is time for, until a part of the budget is spent; `least` of them in any case.

        The first and the last come first, and then those between, so that fewer of them still go as far.
        """
        longest = 0.0
        for number, item in enumerate(spread(items)):
            begun = self.spent
            if number >= least and begun + longest > until * self.budget:
                return
            yield item
            longest = max(longest, self.spent - begun)


def spread[T](items: Sequence[T]) -> list[T]:
    """The items in an order whose beginnings are spread over all of them: both ends, the middle, the middles between."""
    order = [0, len(items) - 1]
    gaps = [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            order.append((low + high) // 2)
            gaps += [(low, order[-1]), (order[-1], high)]
    return [items[i] for i in dict.fromkeys(order) if 0 <= i < len(items)]


@dataclass(frozen=True, slots=True)
class _Measuring:
    """The measurements on devices, each of which takes `least` seconds at least."""

    devices: Sequence[Any]
    effort: Effort
    least: float
    clock: _Clock

    def device(self) -> MeasuredDevice:
        several = len(self.devices) > 1
        share = (
            0.4 if several else 0.9
        )  # of the budget, for what a device does alone; products take half of it
        self.clock.tell("launches")
        launch = microbenchmarks.launch_seconds(self.devices[0], self.least)
        transfers = tuple(self._transfers(0.15 * share))
        products, convolutions = {}, {}
        for number, dtype in enumerate(self.effort.dtypes, start=1):
            until = share * (0.15 + 0.85 * number / len(self.effort.dtypes))
            begun = self.clock.spent / self.clock.budget
            products[_HLO_DTYPES[dtype]] = tuple(
                self._products(dtype, begun + 0.6 * (until - begun))
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
        for size in self.clock.within(self.effort.elements, until, 4):
            self.clock.tell(f"elementwise, {size:,} elements")
            yield 8.0 * size, self._seconds(microbenchmarks.elementwise(self.devices[0], size))

    def _products(self, dtype: str, until: float) -> Iterator[tuple[Gemm, float]]:
        sizes = list(product(self.effort.rows, self.effort.widths))
        for rows, width in self.clock.within(sizes, until, 4):
            self.clock.tell(f"products, {dtype}, {rows} x {width} x {width}")
            benchmark = microbenchmarks.matrix_product(self.devices[0], dtype, rows, width)
            yield Gemm(rows, width, width), self._seconds(benchmark)

    def _convolutions(self, dtype: str, until: float) -> Iterator[tuple[Convolution, float]]:
        for sizes in self.clock.within(self.effort.convolutions, until, 2):
            self.clock.tell(
                f"convolutions, {dtype}, {sizes.batch} x {sizes.side} x {sizes.side} x {sizes.channels}"
            )
            benchmark = microbenchmarks.convolution(
                self.devices[0], dtype, sizes.batch, sizes.side, sizes.channels
            )
            yield sizes, self._seconds(benchmark)

    def _collectives(self, kind: CollectiveKind, until: float) -> MeasuredCollectives:
        count = len(self.devices)
        counts = [each for each in (2, 4, 8, 16) if each < count] + [count]
        rows: list[tuple[int, float, float]] = []
        for size, elements in self.clock.within(
            list(product(counts, self.effort.elements)), until, 6
        ):
            self.clock.tell(f"{kind}, {size} devices, {elements:,} elements")
            num_bytes = 4 * size * -(-elements // size)
            seconds = self._seconds(
                microbenchmarks.collective(kind, self.devices[:size], num_bytes)
            )
            rows.append((size, float(num_bytes), seconds))
        return MeasuredCollectives.of(kind, *zip(*sorted(rows), strict=True))

    def _overlap(self, dtype: str) -> Overlap:
        """Products and an all_reduce that take about as long, by themselves and in one program."""
        self.clock.tell(f"an all_reduce beside products, {dtype}")
        reduce = microbenchmarks.collective(
            "all_reduce", self.devices, 4 * len(self.devices) * self._longest()
        )
        multiply = microbenchmarks.matrix_product(
            None, dtype, self.effort.rows[-1], self.effort.widths[-1]
        )
        y = jax.tree.map(partial(microbenchmarks.on_each, self.devices), multiply.x)

        def products(count: int) -> Benchmark:
            def kernel(y: Any) -> Any:
                for _ in range(count):
                    y = multiply.kernel(y)
                return y

            return Benchmark(microbenchmarks.on_all(self.devices, kernel), y)

        moved = self._seconds(reduce)
        compute = products(max(1, min(64, round(moved / self._seconds(products(1))))))
        both = Benchmark(
            lambda each: (reduce.kernel(each[0]), compute.kernel(each[1])), (reduce.x, compute.x)
        )
        return Overlap(self._seconds(compute), moved, self._seconds(both))

    def _longest(self) -> int:
        """Elements of each of as many parts as there are devices of the longest array."""
        return max(1, max(self.effort.elements) // len(self.devices))

    def _seconds(self, benchmark: Benchmark) -> float:
        return microbenchmarks.kernel_seconds(benchmark, self.least)
