"""Fits the size curve of a kind of collective within a host to measured times, robust to outliers; a fifth of the rows is held out."""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from simulator.collective_profile import SizeCurve, SwitchCurve, hops, sent_fraction
from simulator.work import CollectiveKind

_PARAMETERS = {  # start and bounds
    "launch_us": (8.0, 0.1, 1e3),
    "hop_us": (1.0, 1e-3, 1e2),
    "half_size_mb": (5.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (250.0, 0.1, 1e4),
    "small_group_loss": (0.3, 1e-3, 1.5),
}
_OUTLIER = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredCollectives:
    """One kind of collective: group sizes, bytes (as in `simulator.work.Collective`) and seconds, as arrays of one length."""

    kind: CollectiveKind
    size: NDArray[np.int64]
    num_bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, kind: CollectiveKind, size: ArrayLike, num_bytes: ArrayLike, seconds: ArrayLike):
        measured = cls(
            kind, np.asarray(size, np.int64), np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
        )
        if not len(measured.size) == len(measured.num_bytes) == len(measured.seconds):
            raise ValueError(f"{len(measured.size)} sizes and {len(measured.seconds)} times; expected as many")
        return measured

    def __getitem__(self, rows: NDArray) -> "MeasuredCollectives":
        return MeasuredCollectives(self.kind, self.size[rows], self.num_bytes[rows], self.seconds[rows])

    def held_out(self) -> NDArray[np.bool_]:
        """Which rows are for checking only: a fifth, by the CRC of kind, size and bytes."""
        rows = zip(self.size, self.num_bytes, strict=True)
        return np.array([zlib.crc32(f"{self.kind},{size},{moved:.0f}".encode()) % 5 == 0 for size, moved in rows])

    def errors(self, curve: SizeCurve) -> NDArray[np.float64]:
        """Predicted over measured, minus one."""
        rows = zip(self.size.tolist(), self.num_bytes.tolist(), strict=True)
        return np.array([curve.seconds(self.kind, moved, size) for size, moved in rows]) / self.seconds - 1


def fit_curve(measured: MeasuredCollectives) -> SizeCurve:
    """The curve of one kind of collective, with its mean absolute error on the rows that were held out."""
    held = measured.held_out()
    if (~held).sum() < len(_PARAMETERS):
        raise ValueError(f"{(~held).sum()} collectives to fit; expected at least {len(_PARAMETERS)}, one per parameter")
    size, seconds = measured.size, measured.seconds
    sent = np.array([sent_fraction(measured.kind, int(n)) for n in size]) * measured.num_bytes
    steps = np.array([hops(measured.kind, int(n)) for n in size])
    groups = len(set(size.tolist()))
    starts, low, high = np.log(np.array(list(_PARAMETERS.values()))).T
    if groups < 2:  # one group size doesn't tell hops from the launch, nor the loss of small groups from the bandwidth
        starts[[1, 4]] = low[[1, 4]] + 1e-6

    def residuals(values: NDArray) -> NDArray:
        launch, hop, half, bandwidth, loss = np.exp(values)
        moved = (sent + np.sqrt(sent * half * 1e6)) / (bandwidth * 1e9 * (1 - loss / size))
        return np.log(((launch + steps * hop) * 1e-6 + moved) / seconds)[~held]

    solution = least_squares(residuals, starts, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, max_nfev=300)
    curve = SizeCurve(**dict(zip(_PARAMETERS, np.exp(solution.x).tolist(), strict=True)))
    error = float(np.abs(measured.errors(curve)[held]).mean()) if held.any() else None
    return curve.model_copy(update={"held_out_error": error})


_SWITCH_PARAMETERS = {  # start and bounds
    "launch_us": (30.0, 0.1, 1e3),
    "half_size_mb": (1.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (300.0, 0.1, 1e4),
}


def fit_switch(measured: MeasuredCollectives, ring: SizeCurve | None) -> SwitchCurve:
    """The curve of all_reduces that the switch makes where it is faster than `ring`; always, if that is None."""
    held = measured.held_out()
    if (~held).sum() < len(_SWITCH_PARAMETERS):
        raise ValueError(f"{(~held).sum()} all_reduces to fit; expected at least {len(_SWITCH_PARAMETERS)}")
    rows = list(zip(measured.size.tolist(), measured.num_bytes.tolist(), strict=True))
    rings = np.array([np.inf if ring is None else ring.seconds("all_reduce", moved, n) for n, moved in rows])
    starts, low, high = np.log(np.array(list(_SWITCH_PARAMETERS.values()))).T

    def curve(values: NDArray) -> SwitchCurve:
        return SwitchCurve(**dict(zip(_SWITCH_PARAMETERS, np.exp(values).tolist(), strict=True)))

    def residuals(values: NDArray) -> NDArray:
        switch = curve(values)
        return np.log(np.minimum(rings, [switch.seconds(moved, n) for n, moved in rows]) / measured.seconds)

    solution = least_squares(
        lambda values: residuals(values)[~held], starts, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER
    )
    error = float(np.abs(np.expm1(residuals(solution.x)))[held].mean()) if held.any() else None
    return curve(solution.x).model_copy(update={"held_out_error": error})
