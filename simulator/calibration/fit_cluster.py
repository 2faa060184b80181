"""Fits the description of a cluster of one host to what was measured on its devices, robust to outliers.

A fifth of the products and convolutions, by a hash of their sizes, is held out, as are a fifth of the collectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve
from simulator.calibration.fit_products import is_held_out
from simulator.costs.gemm import width_of
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster, Device, Link, Provenance
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink
from simulator.hardware.description import validate
from simulator.work import CollectiveKind, Gemm, Kernel

_OUTLIER = 0.1  # of the logarithm of predicted over measured


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of products and of an all_reduce, each by itself, and of both in one program."""

    computed: float
    moved: float
    both: float

    @property
    def contention_factor(self) -> float:
        """How many times longer each takes while both go on (`simulator.hardware.cluster.Link`): all is shared that the shorter one takes."""
        longer, shorter = max(self.computed, self.moved), min(self.computed, self.moved)
        return min(2.0, max(1.0, 1 + (self.both - longer) / shorter))


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sizes of a convolution of 3 x 3: square images, as many channels out as in."""

    batch: int
    side: int
    channels: int

    def kernel(self, dtype: str) -> Kernel:
        pixels = self.batch * self.side**2
        moved = width_of(dtype) * self.channels * (2 * pixels + 9 * self.channels)
        return Kernel("", "conv", 2.0 * 9 * pixels * self.channels**2, moved, dtype)


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """Seconds of single kernels, and of collectives where there are several devices.

    Attributes:
        transfers: bytes that an elementwise kernel reads and writes, and its seconds.
        products, convolutions: by HLO dtype, with their seconds.
        collectives: by kind.
        overlaps: of a collective and products, of each dtype, say.
        launch: seconds of the host to start a program.
    """

    transfers: tuple[tuple[float, float], ...]
    products: Mapping[str, tuple[tuple[Gemm, float], ...]]
    convolutions: Mapping[str, tuple[tuple[Convolution, float], ...]] = field(default_factory=dict)
    collectives: Mapping[CollectiveKind, MeasuredCollectives] = field(default_factory=dict)
    overlaps: tuple[Overlap, ...] = ()
    launch: float | None = None

    def product_errors(self, device: Device) -> NDArray[np.float64]:
        """The logarithm of predicted over measured seconds of each product."""
        return _log_errors(
            device, [row for dtype in self.products for row in _product_rows(self, dtype)]
        )


def fit_device(base: Device, measured: MeasuredDevice, name: str, source: str) -> Device:
    """The device `base` with what was measured on it.

    A GPU keeps the peaks of its data sheet, and gets the fractions of them that were reached; of a CPU the highest rates seen count
    as its peaks. `source` becomes part of the description, with the error that remains.
    """
    if len(measured.transfers) < 2 or not all(measured.products.values()):
        raise ValueError(
            "expected two transfers and a product of each dtype at least; measure more sizes"
        )
    launch, bandwidth, half_size = launch_and_bandwidth(measured.transfers)
    rates = {
        dtype: max(gemm.flops / seconds for gemm, seconds in of)
        for dtype, of in measured.products.items()
    }
    for dtype, of in measured.convolutions.items():
        rates[dtype] = max(
            rates.get(dtype, 0.0), *(each.kernel(dtype).flops / seconds for each, seconds in of)
        )
    known = base.kind == "gpu"
    peaks = {
        dtype: max(rate / 1e12, base.peak_tflop_per_s.get(dtype, 0) * known)
        for dtype, rate in rates.items()
    }
    memory = max(bandwidth / 1e9, base.memory_bandwidth_gb_per_s * known)
    fields = base.fields() | {
        "name": name,
        "source": source,
        "peak_tflop_per_s": base.peak_tflop_per_s | peaks,
        "memory_bandwidth_gb_per_s": memory,
        "kernel_launch_us": launch * 1e6,
    }
    kernels = dict(base.kernels) | {
        "source": "",
        "launch_us": None,
        "memory_efficiency": min(1.0, bandwidth / 1e9 / memory),
        "half_size_mb": half_size / 1e6,
        "held_out_error": None,
    }

    def device(
        names: Mapping[str, Sequence[str]], values: NDArray, base: Mapping[str, object]
    ) -> Device:
        """With a fitted value for each dtype under each name; one without dtypes has a single value."""
        fitted, rest = dict(base), iter(values.tolist())
        for field_name, dtypes in names.items():
            fitted[field_name] = {dtype: next(rest) for dtype in dtypes} if dtypes else next(rest)
        return validate(Device, fields | {"kernels": fitted}, name)

    dtypes = list(measured.products)
    rows = [row for dtype in dtypes for row in _split(_product_rows(measured, dtype))[0]]
    start = np.array([1.0, *[0.8] * len(dtypes)])
    low, high = np.array([0.0, *[0.01] * len(dtypes)]), np.array([1e3, *[1.0] * len(dtypes)])
    of_products = {"tile_us": (), "efficiency_by_dtype": dtypes}
    solution = least_squares(
        lambda values: _log_errors(device(of_products, values, kernels), rows),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    found = device(of_products, solution.x, kernels)
    if dtypes := [dtype for dtype, of in measured.convolutions.items() if of]:
        convolutions = [
            row for dtype in dtypes for row in _split(_convolution_rows(measured, dtype))[0]
        ]
        of_convolutions = {"conv_efficiency_by_dtype": dtypes}
        solution = least_squares(
            lambda values: _log_errors(
                device(of_convolutions, values, dict(found.kernels)), convolutions
            ),
            [0.5] * len(dtypes),
            bounds=(1e-4, 1.0),
            loss="soft_l1",
            f_scale=_OUTLIER,
        )
        found = device(of_convolutions, solution.x, dict(found.kernels))
    errors = np.abs(np.expm1(measured.product_errors(found)))
    return found.model_copy(
        update={"source": f"{source}; mean error over {len(errors)} products {errors.mean():.1%}"}
    )


def fit_cluster(
    base: Cluster,
    device: Device,
    measured: MeasuredDevice,
    devices: int,
    provenance: Provenance | None = None,
) -> Cluster:
    """One host with so many of the devices; its links are those of `base` unless collectives were measured.

    `provenance` is completed with how many rows there are of what, and the errors on them.
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
    rows = {what: (len(fitted), len(held)) for what, fitted, held in _errors(cluster, measured)}
    found = {what: (fitted, held) for what, fitted, held in _errors(cluster, measured)}
    update = {
        "rows": {what: sum(counts) for what, counts in rows.items()},
        "fitted_error": {
            what: float(np.mean(fitted)) for what, (fitted, _) in found.items() if len(fitted)
        },
        "held_out_error": {
            what: float(np.mean(held)) for what, (_, held) in found.items() if len(held)
        },
    }
    return cluster.model_copy(update={"provenance": provenance.model_copy(update=update)})


type _Rows = list[tuple[Kernel, tuple[int, ...], float]]
"""Kernels, their sizes, and their seconds."""


def _product_rows(measured: MeasuredDevice, dtype: str) -> _Rows:
    def kernel(gemm: Gemm) -> Kernel:
        moved = gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        return Kernel("", "gemm", gemm.flops, width_of(dtype) * moved, dtype, gemm)

    return [
        (kernel(gemm), (gemm.m, gemm.n, gemm.k), seconds)
        for gemm, seconds in measured.products[dtype]
    ]


def _convolution_rows(measured: MeasuredDevice, dtype: str) -> _Rows:
    rows = measured.convolutions[dtype]
    return [
        (each.kernel(dtype), (each.batch, each.side, each.channels), seconds)
        for each, seconds in rows
    ]


def _split(rows: _Rows) -> tuple[_Rows, _Rows]:
    """What is fitted to, and what is held out; nothing, where too little would be left."""
    held = [row for row in rows if is_held_out(*row[1])]
    if len(rows) - len(held) < 2:
        return rows, []
    return [row for row in rows if not is_held_out(*row[1])], held


def _log_errors(device: Device, rows: _Rows) -> NDArray[np.float64]:
    """The logarithm of predicted over measured seconds."""
    model = KernelModel(device)
    return np.log([model.seconds(kernel) / seconds for kernel, _, seconds in rows])


def _errors(cluster: Cluster, measured: MeasuredDevice) -> Iterator[tuple[str, NDArray, NDArray]]:
    """Of everything that was measured: absolute relative errors on the rows that were fitted to, and on those held out."""
    device, nothing = cluster.device, np.array([])
    transfers = [
        (Kernel("", "memory", 0.0, num_bytes), (), seconds)
        for num_bytes, seconds in measured.transfers
    ]
    yield "elementwise", np.abs(np.expm1(_log_errors(device, transfers))), nothing
    kinds = (
        ("products", measured.products, _product_rows),
        ("convolutions", measured.convolutions, _convolution_rows),
    )
    for what, dtypes, rows_of in kinds:
        for dtype in dtypes:
            of_fit, held = (
                np.abs(np.expm1(_log_errors(device, rows)))
                for rows in _split(rows_of(measured, dtype))
            )
            yield f"{what} {dtype}", of_fit, held
    for kind, rows in measured.collectives.items():
        errors, held_out = np.abs(rows.errors(cluster.curves.curve(kind))), rows.held_out()
        yield kind, errors[~held_out], errors[held_out]


def launch_and_bandwidth(transfers: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Of (bytes, seconds): seconds of nothing, bytes per second of much, bytes of the ramp; least squares of the relative error."""
    num_bytes, seconds = np.array(transfers).T
    columns = np.stack([np.ones_like(num_bytes), num_bytes, np.sqrt(num_bytes)], axis=1)
    (launch, per_byte, per_root), _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    per_byte = max(per_byte, 1e-15)
    return float(launch), float(1 / per_byte), float((per_root / per_byte) ** 2)
