"""Fits the GEMM model to measured products: least squares of the logarithm of predicted over measured, robust to outliers.

A fifth of the shapes, by a hash of their sizes, is never fitted: errors are quoted on those.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from simulator.costs.gemm import GemmModel
from simulator.hardware.cluster import Device
from simulator.hardware.kernel_profile import KernelProfile

# start, and bounds, of what is fitted
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
_OUTLIER = 0.05  # relative errors above this count linearly, not squared


@dataclass(frozen=True, slots=True)
class MeasuredGemms:
    """Products and their seconds, as arrays of one length."""

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    k: NDArray[np.int64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, m: ArrayLike, n: ArrayLike, k: ArrayLike, seconds: ArrayLike) -> "MeasuredGemms":
        measured = cls(
            np.asarray(m, np.int64),
            np.asarray(n, np.int64),
            np.asarray(k, np.int64),
            np.asarray(seconds, np.float64),
        )
        if not len(measured.m) == len(measured.n) == len(measured.k) == len(
            measured.seconds
        ) or not len(measured.m):
            raise ValueError(
                f"{len(measured.m)} products and {len(measured.seconds)} times; expected as many, not none"
            )
        if not (measured.seconds > 0).all():
            raise ValueError(f"times down to {measured.seconds.min()} s; expected all above 0")
        return measured

    def __getitem__(self, rows: NDArray) -> "MeasuredGemms":
        return MeasuredGemms(self.m[rows], self.n[rows], self.k[rows], self.seconds[rows])

    def held_out(self) -> NDArray[np.bool_]:
        """Which rows are for checking only: a fifth, by the CRC of their sizes."""
        return np.array([is_held_out(*sizes) for sizes in zip(self.m, self.n, self.k, strict=True)])


def is_held_out(m: int, n: int, k: int) -> bool:
    """Whether a shape is kept away from fits."""
    return zlib.crc32(f"{m},{n},{k}".encode()) % 5 == 0


def errors(model: GemmModel, measured: MeasuredGemms) -> NDArray[np.float64]:
    """Predicted over measured, minus one."""
    return model.seconds_of(measured.m, measured.n, measured.k) / measured.seconds - 1


def fit_gemms(
    device: Device, dtype: str, measured: MeasuredGemms, max_rows: int = 2500
) -> KernelProfile:
    """The kernels of `device` with eleven parameters fitted to at most `max_rows` of the products that are not held out."""
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
    held = measured.held_out()
    error = float(np.abs(errors(model(best), measured[held])).mean()) if held.any() else None
    return best.model_copy(update={"held_out_error": error})
