"""Fit the description of a cluster of one host to measurements of its devices, robust to outliers.

A fifth of the products and convolutions, by a hash of their sizes, is held out, and a fifth of the
collectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve
from simulator.calibration.fit_products import is_held_out
from simulator.costs.gemm import width_of
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster, Link, Provenance
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink
from simulator.hardware.description import validate
from simulator.hardware.device import Device
from simulator.work import CollectiveKind, Gemm, Kernel

_OUTLIER = 0.1
"""Logarithm of predicted over measured above which errors count linearly, not squared."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Measured overlap of products and an all_reduce.

    Attributes:
        computed: seconds of the products alone.
        moved: seconds of the all_reduce alone.
        both: seconds of both in one program.
    """

    computed: float
    moved: float
    both: float

    @property
    def contention_factor(self) -> float:
        """Factor by which each is slower while both run (`simulator.hardware.cluster.Link`).

        Both run for as long as the shorter one takes alone.
        """
        longer = max(self.computed, self.moved)
        shorter = min(self.computed, self.moved)
        return min(2.0, max(1.0, 1 + (self.both - longer) / shorter))


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sizes of a 3 x 3 convolution.

    Attributes:
        batch: number of images.
        side: width and height of an image.
        channels: channels of inputs and of outputs.
    """

    batch: int
    side: int
    channels: int

    def kernel(self, dtype: str) -> Kernel:
        """Return the kernel of the convolution."""
        pixels = self.batch * self.side**2
        moved = width_of(dtype) * self.channels * (2 * pixels + 9 * self.channels)
        return Kernel("", "conv", 2.0 * 9 * pixels * self.channels**2, moved, dtype)


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """Seconds of single kernels, and of collectives where there are several devices.

    Attributes:
        transfers: bytes that an elementwise kernel reads and writes, and its seconds.
        products: sizes of matrix products and their seconds, by HLO dtype.
        convolutions: sizes of convolutions and their seconds, by HLO dtype.
        collectives: seconds of collectives, by kind.
        overlaps: overlaps of a collective and products, e.g. of each dtype.
        launch: seconds in which the host starts a program.
    """

    transfers: tuple[tuple[float, float], ...]
    products: Mapping[str, tuple[tuple[Gemm, float], ...]]
    convolutions: Mapping[str, tuple[tuple[Convolution, float], ...]] = field(default_factory=dict)
    collectives: Mapping[CollectiveKind, MeasuredCollectives] = field(default_factory=dict)
    overlaps: tuple[Overlap, ...] = ()
    launch: float | None = None

    def product_errors(self, device: Device) -> NDArray[np.float64]:
        """Return the logarithm of predicted over measured seconds of each product."""
        return _log_errors(
            device, [row for dtype in self.products for row in _product_rows(self, dtype)]
        )


def fit_device(base: Device, measured: MeasuredDevice, name: str, source: str) -> Device:
    """Return a device with peaks and a kernel profile that are fitted to measurements.

    A GPU keeps the peaks of its data sheet, and gets the fractions of them that were reached. The
    highest measured rates of a CPU count as its peaks.

    Args:
        base: the device whose other fields the result has.
        measured: the measurements.
        name: name of the device.
        source: origin of the measurements; the description gets the remaining error too.

    Raises:
        ValueError: there are fewer than two transfers, or a dtype without products.
    """
    if len(measured.transfers) < 2 or not all(measured.products.values()):
        raise ValueError(
            "expected two transfers and a product of each dtype at least; measure more sizes"
        )
    device = _with_peaks(base, measured, name, source)
    dtypes = list(measured.products)
    rows = [row for dtype in dtypes for row in _split(_product_rows(measured, dtype))[0]]
    device = _with_fitted_kernels(
        device,
        [
            _Parameter("tile_us", start=1.0, low=0.0, high=1e3),
            _Parameter("efficiency_by_dtype", start=0.8, low=0.01, high=1.0, dtypes=dtypes),
        ],
        rows,
    )
    if dtypes := [dtype for dtype, timings in measured.convolutions.items() if timings]:
        rows = [row for dtype in dtypes for row in _split(_convolution_rows(measured, dtype))[0]]
        efficiency = _Parameter(
            "conv_efficiency_by_dtype", start=0.5, low=1e-4, high=1.0, dtypes=dtypes
        )
        device = _with_fitted_kernels(device, [efficiency], rows)
    errors = np.abs(np.expm1(measured.product_errors(device)))
    return device.model_copy(
        update={"source": f"{source}; mean error over {len(errors)} products {errors.mean():.1%}"}
    )


def _with_peaks(base: Device, measured: MeasuredDevice, name: str, source: str) -> Device:
    """Return a device with the measured launch and memory bandwidth, and peaks above all rates."""
    launch, bandwidth, half_size = launch_and_bandwidth(measured.transfers)
    rates = {
        dtype: max(gemm.flops / seconds for gemm, seconds in timings)
        for dtype, timings in measured.products.items()
    }
    for dtype, timings in measured.convolutions.items():
        conv_rates = (conv.kernel(dtype).flops / seconds for conv, seconds in timings)
        rates[dtype] = max([rates.get(dtype, 0.0), *conv_rates])
    peaks = {dtype: rate / 1e12 for dtype, rate in rates.items()}
    memory = bandwidth / 1e9
    if base.kind == "gpu":
        peaks = {
            dtype: max(peak, base.peak_tflop_per_s.get(dtype, 0)) for dtype, peak in peaks.items()
        }
        memory = max(memory, base.memory_bandwidth_gb_per_s)
    kernels = base.kernels.fields() | {
        "source": "",
        "launch_us": None,
        "memory_efficiency": min(1.0, bandwidth / 1e9 / memory),
        "half_size_mb": half_size / 1e6,
        "held_out_error": None,
    }
    fields = base.fields() | {
        "name": name,
        "source": source,
        "peak_tflop_per_s": base.peak_tflop_per_s | peaks,
        "memory_bandwidth_gb_per_s": memory,
        "kernel_launch_us": launch * 1e6,
        "kernels": kernels,
    }
    return validate(Device, fields, name)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A field of a kernel profile that is fitted: a number, or a number for each of its dtypes."""

    field: str
    start: float
    low: float
    high: float
    dtypes: Sequence[str] = ()


def _with_fitted_kernels(device: Device, parameters: Sequence[_Parameter], rows: "_Rows") -> Device:
    """Return a device whose kernel profile has the parameters that fit rows best."""
    from scipy.optimize import least_squares  # slow to import

    ranges = [
        (parameter.start, parameter.low, parameter.high)
        for parameter in parameters
        for _ in parameter.dtypes or [None]
    ]
    start, low, high = np.array(ranges).T

    def with_values(values: NDArray) -> Device:
        remaining = iter(values.tolist())
        kernels = device.kernels.fields()
        for parameter in parameters:
            if parameter.dtypes:
                kernels[parameter.field] = {dtype: next(remaining) for dtype in parameter.dtypes}
            else:
                kernels[parameter.field] = next(remaining)
        return device.model_copy(update={"kernels": kernels})

    solution = least_squares(
        lambda values: _log_errors(with_values(values), rows),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    return with_values(solution.x)


def fit_cluster(
    base: Cluster,
    device: Device,
    measured: MeasuredDevice,
    devices: int,
    provenance: Provenance | None = None,
) -> Cluster:
    """Return a cluster of one host.

    Args:
        base: the cluster whose link the result has, unless collectives were measured.
        device: the kind of its devices.
        measured: the measurements.
        devices: number of devices.
        provenance: origin of the measurements, to which their numbers and errors are added.
    """
    fields = base.fields() | {
        "device": device,
        "hosts": 1,
        "devices_per_host": devices,
        "inter_host": None,
    }
    fields |= {
        "name": device.name,
        "description": f"{devices} x {device.name}",
        "source": device.source,
    }
    if measured.launch is not None:
        fields["host_launch_us"] = measured.launch * 1e6
    if measured.collectives:
        curves = {kind: fit_curve(rows) for kind, rows in measured.collectives.items()}
        curve = curves["all_reduce"]
        contention = base.intra_host.contention_factor
        if measured.overlaps:
            contention = mean(overlap.contention_factor for overlap in measured.overlaps)
        profile = CollectiveProfile(
            gpu=device.name,
            source=device.source,
            link=MeasuredLink.of(curve, devices),
            **curves,  # pyright: ignore[reportArgumentType]
        )
        numbers = profile.link.model_dump()
        launch = numbers.pop("collective_launch_us")
        link = Link(**numbers, contention_factor=contention)
        fields |= {"intra_host": link, "collective_launch_us": launch, "collectives": profile}
    cluster = validate(Cluster, fields, device.name)
    if provenance is None:
        return cluster
    errors = list(_errors(cluster, measured))
    update = {
        "rows": {what: len(fitted) + len(held_out) for what, fitted, held_out in errors},
        "fitted_error": {what: float(np.mean(fitted)) for what, fitted, _ in errors if len(fitted)},
        "held_out_error": {
            what: float(np.mean(held_out)) for what, _, held_out in errors if len(held_out)
        },
    }
    return cluster.model_copy(update={"provenance": provenance.model_copy(update=update)})


type _Rows = list[tuple[Kernel, tuple[int, ...], float]]
"""Kernels, their sizes, and their seconds."""


def _product_rows(measured: MeasuredDevice, dtype: str) -> _Rows:
    """Return the products of a dtype."""

    def kernel(gemm: Gemm) -> Kernel:
        moved = gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        return Kernel("", "gemm", gemm.flops, width_of(dtype) * moved, dtype, gemm)

    return [
        (kernel(gemm), (gemm.m, gemm.n, gemm.k), seconds)
        for gemm, seconds in measured.products[dtype]
    ]


def _convolution_rows(measured: MeasuredDevice, dtype: str) -> _Rows:
    """Return the convolutions of a dtype."""
    return [
        (conv.kernel(dtype), (conv.batch, conv.side, conv.channels), seconds)
        for conv, seconds in measured.convolutions[dtype]
    ]


def _split(rows: _Rows) -> tuple[_Rows, _Rows]:
    """Return the rows to fit and those held out, none of them where too few would be left."""
    held_out = [row for row in rows if is_held_out(*row[1])]
    if len(rows) - len(held_out) < 2:
        return rows, []
    return [row for row in rows if not is_held_out(*row[1])], held_out


def _log_errors(device: Device, rows: _Rows) -> NDArray[np.float64]:
    """Return the logarithm of predicted over measured seconds of each row."""
    model = KernelModel(device)
    return np.log([model.seconds(kernel) / seconds for kernel, _, seconds in rows])


def _errors(cluster: Cluster, measured: MeasuredDevice) -> Iterator[tuple[str, NDArray, NDArray]]:
    """Yield what was measured, with absolute relative errors on fitted and on held-out rows."""
    device = cluster.device
    transfers = [
        (Kernel("", "memory", 0.0, num_bytes), (), seconds)
        for num_bytes, seconds in measured.transfers
    ]
    yield "elementwise", np.abs(np.expm1(_log_errors(device, transfers))), np.array([])
    kinds = (
        ("products", measured.products, _product_rows),
        ("convolutions", measured.convolutions, _convolution_rows),
    )
    for what, dtypes, rows_of in kinds:
        for dtype in dtypes:
            fitted, held_out = (
                np.abs(np.expm1(_log_errors(device, rows)))
                for rows in _split(rows_of(measured, dtype))
            )
            yield f"{what} {dtype}", fitted, held_out
    for kind, rows in measured.collectives.items():
        errors = np.abs(rows.errors(cluster.curves.curve(kind)))
        held_out = rows.held_out()
        yield kind, errors[~held_out], errors[held_out]


def launch_and_bandwidth(transfers: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the launch, bandwidth and half size that fit transfers best.

    Args:
        transfers: bytes and seconds of each.

    Returns:
        Seconds of an empty transfer, bytes per second of a long one, and bytes of the ramp
        (`half_size` of `simulator.hardware.collective_profile.transfer_seconds`), by least squares
        of the relative error.
    """
    from scipy.optimize import nnls  # slow to import

    num_bytes, seconds = np.array(transfers).T
    columns = np.stack([np.ones_like(num_bytes), num_bytes, np.sqrt(num_bytes)], axis=1)
    (launch, per_byte, per_root), _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    per_byte = max(per_byte, 1e-15)
    return float(launch), float(1 / per_byte), float((per_root / per_byte) ** 2)
