"""Fit the GEMM model to measured products by least squares of the log error, robust to outliers.

A fifth of the shapes, by a hash of their sizes, is held out of the fit; errors are those on that
fifth.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.costs.gemm import GemmModel
from simulator.hardware.device import Device
from simulator.hardware.kernel_profile import KernelProfile

_PARAMETERS = {
    "launch_us": (2.0, 0.5, 5.0),
    "efficiency": (0.88, 0.5, 1.0),
    "tile_us": (1.0, 1e-3, 20.0),
    "step_ns": (1.0, 1e-3, 20.0),
    "cache_gb_per_s_per_core": (60.0, 10.0, 1000.0),
    "memory_efficiency": (0.85, 0.5, 1.0),
    "half_size_mb": (1.0, 1e-3, 100.0),
    "overlap": (2.5, 1.2, 8.0),
    "wave_quantization": (0.5, 1e-3, 1.0),
    "throttling": (0.1, 1e-3, 0.5),
    "split_k_us": (2.0, 0.1, 10.0),
}
"""Start, lower and upper bound of each fitted field of a kernel profile."""

_OUTLIER = 0.05
"""Relative error above which errors count linearly, not squared."""


@dataclass(frozen=True, slots=True)
class MeasuredGemms:
    """Measured products of (m, k) by (k, n) and their seconds, as arrays of one length."""

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    k: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, m: ArrayLike, n: ArrayLike, k: ArrayLike, seconds: ArrayLike) -> "MeasuredGemms":
        """Return measurements from array-likes.

        Raises:
            ValueError: their lengths differ, there are none, or a time is not above 0.
        """
        measured = cls(
            np.asarray(m, np.int64),
            np.asarray(n, np.int64),
            np.asarray(k, np.int64),
            np.asarray(seconds, np.float64),
        )
        lengths = {len(measured.m), len(measured.n), len(measured.k), len(measured.seconds)}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(
                f"{len(measured.m)} products and {len(measured.seconds)} times; expected as many, "
                "not none"
            )
        if not (measured.seconds > 0).all():
            raise ValueError(f"times down to {measured.seconds.min()} s; expected all above 0")
        return measured

    def __getitem__(self, rows: NDArray) -> "MeasuredGemms":
        return MeasuredGemms(self.m[rows], self.n[rows], self.k[rows], self.seconds[rows])

    def held_out(self) -> NDArray[np.bool_]:
        """Return which rows are held out of the fit: a fifth, by the CRC of their sizes."""
        return np.array([is_held_out(*sizes) for sizes in zip(self.m, self.n, self.k, strict=True)])


def is_held_out(m: int, n: int, k: int) -> bool:
    """Return whether a shape is held out of fits."""
    return zlib.crc32(f"{m},{n},{k}".encode()) % 5 == 0


def errors(model: GemmModel, measured: MeasuredGemms) -> NDArray[np.float64]:
    """Return predicted over measured seconds, minus one."""
    return model.seconds_of(measured.m, measured.n, measured.k) / measured.seconds - 1


def fit_gemms(
    device: Device, dtype: str, measured: MeasuredGemms, max_rows: int = 2500
) -> KernelProfile:
    """Return a kernel profile with eleven parameters fitted to products, with its held-out error.

    Args:
        device: the device, with the other fields of its kernel profile.
        dtype: HLO's name of the type of the products.
        measured: the products.
        max_rows: number of products to fit, chosen at random among those that are not held out.

    Raises:
        ValueError: there are fewer rows to fit than parameters.
    """
    from scipy.optimize import least_squares  # slow to import

    rows = np.flatnonzero(~measured.held_out())
    if len(rows) < len(_PARAMETERS):
        raise ValueError(
            f"{len(rows)} products to fit; expected at least {len(_PARAMETERS)}, one per parameter"
        )
    fitted = measured[np.random.default_rng(0).permutation(rows)[:max_rows]]
    starts, low, high = np.log(np.array(list(_PARAMETERS.values()))).T

    def profile(values: NDArray) -> KernelProfile:
        return device.kernels.model_copy(
            update=dict(zip(_PARAMETERS, np.exp(values).tolist(), strict=True))
        )

    def model(profile: KernelProfile) -> GemmModel:
        return GemmModel.of(device.model_copy(update={"kernels": profile}), dtype)

    def residuals(values: NDArray) -> NDArray:
        return np.log1p(errors(model(profile(values)), fitted))

    solution = least_squares(
        residuals,
        starts,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
        diff_step=1e-3,
        max_nfev=80,
    )
    best = profile(solution.x)
    held_out = measured.held_out()
    error = None
    if held_out.any():
        error = float(np.abs(errors(model(best), measured[held_out])).mean())
    return best.model_copy(update={"held_out_error": error})
