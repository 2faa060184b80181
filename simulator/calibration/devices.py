"""Fits the description of a cluster of one host to what was measured on its devices, robust to outliers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from simulator.calibration.collectives import MeasuredCollectives, fit_curve
from simulator.cluster import Cluster, Device
from simulator.description import validate
from simulator.gemm import GemmModel
from simulator.work import Gemm

_OUTLIER = 0.1  # of the logarithm of predicted over measured


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of products and of an all_reduce, each by itself, and of both in one program."""

    computed: float
    moved: float
    both: float

    @property
    def slowdown(self) -> float:
        """How many times longer each takes while both go on (`simulator.cluster.Link`): all is shared that the shorter one takes."""
        longer, shorter = max(self.computed, self.moved), min(self.computed, self.moved)
        return min(2.0, max(1.0, 1 + (self.both - longer) / shorter))


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """Seconds of single kernels, and of collectives where there are several devices.

    Attributes:
        transfers: bytes that an elementwise kernel reads and writes, and its seconds.
        products: by HLO dtype, products and their seconds.
    """

    transfers: tuple[tuple[float, float], ...]
    products: Mapping[str, tuple[tuple[Gemm, float], ...]]
    all_reduces: MeasuredCollectives | None = None
    overlap: Overlap | None = None

    def product_errors(self, device: Device) -> NDArray[np.float64]:
        """The logarithm of predicted over measured seconds of each product."""
        rows = ((GemmModel.of(device, dtype), of) for dtype, of in self.products.items())
        return np.log([model.seconds(g.m, g.n, g.k, g.batch) / seconds for model, of in rows for g, seconds in of])


def fit_device(base: Device, measured: MeasuredDevice, name: str, source: str) -> Device:
    """The device `base` with what was measured on it.

    A GPU keeps the peaks of its data sheet, and gets the fractions of them that were reached; of a CPU the highest rates seen count
    as its peaks. `source` becomes part of the description, with the error that remains.
    """
    if len(measured.transfers) < 2 or not all(measured.products.values()):
        raise ValueError("expected two transfers and a product of each dtype at least; measure more sizes")
    launch, bandwidth, half_size = launch_and_bandwidth(measured.transfers)
    rates = {dtype: max(gemm.flops / seconds for gemm, seconds in of) for dtype, of in measured.products.items()}
    known = base.kind == "gpu"
    peaks = {dtype: max(rate / 1e12, base.peak_tflop_per_s.get(dtype, 0) * known) for dtype, rate in rates.items()}
    memory = max(bandwidth / 1e9, base.memory_bandwidth_gb_per_s * known)
    fields = dict(base) | {
        "name": name,
        "source": source,
        "peak_tflop_per_s": base.peak_tflop_per_s | peaks,
        "memory_bandwidth_gb_per_s": memory,
        "kernel_launch_us": launch * 1e6,
    }
    dtypes = list(measured.products)
    kernels = dict(base.kernels) | {
        "source": "",
        "launch_us": None,
        "memory_efficiency": min(1.0, bandwidth / 1e9 / memory),
        "half_size_mb": half_size / 1e6,
        "held_out_error": None,
    }

    def device(values: NDArray) -> Device:
        efficiency = dict(zip(dtypes, values[1:].tolist(), strict=True))
        fitted = kernels | {"tile_us": float(values[0]), "efficiency_by_dtype": efficiency}
        return validate(Device, fields | {"kernels": fitted}, name)

    start = np.array([1.0, *[0.8] * len(dtypes)])
    low, high = np.array([0.0, *[0.01] * len(dtypes)]), np.array([1e3, *[1.0] * len(dtypes)])
    solution = least_squares(
        lambda values: measured.product_errors(device(values)),
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    found = device(solution.x)
    error = np.abs(np.expm1(measured.product_errors(found))).mean()
    note = f"mean error over {sum(map(len, measured.products.values()))} products {error:.1%}"
    return found.model_copy(update={"source": f"{source}; {note}"})


def fit_cluster(base: Cluster, device: Device, measured: MeasuredDevice, devices: int) -> Cluster:
    """One host with so many of the devices; its links are those of `base` unless collectives were measured."""
    fields = dict(base) | {"device": device, "hosts": 1, "devices_per_host": devices, "inter_host": None}
    fields |= {"name": device.name, "description": f"{devices} x {device.name}", "source": device.source}
    if measured.all_reduces is not None:
        curve = fit_curve(measured.all_reduces)
        link = base.intra_host.model_copy(
            update={
                "bandwidth_gb_per_s": curve.bandwidth(devices) / 1e9,
                "group_bandwidth_gb_per_s": {},
                "latency_us": curve.hop_us,
                "half_size_mb": curve.half_size_mb,
                "slowdown": measured.overlap.slowdown if measured.overlap else base.intra_host.slowdown,
            }
        )
        fields |= {"intra_host": link, "collective_launch_us": curve.launch_us, "collectives": None}
    return validate(Cluster, fields, device.name)


def launch_and_bandwidth(transfers: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Of (bytes, seconds): seconds of nothing, bytes per second of much, bytes of the ramp; least squares of the relative error."""
    num_bytes, seconds = np.array(transfers).T
    columns = np.stack([np.ones_like(num_bytes), num_bytes, np.sqrt(num_bytes)], axis=1)
    (launch, per_byte, per_root), _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    per_byte = max(per_byte, 1e-15)
    return float(launch), float(1 / per_byte), float((per_root / per_byte) ** 2)
