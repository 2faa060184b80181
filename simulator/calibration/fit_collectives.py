"""Fit size curves of collectives within a host to measured times, robust to outliers.

A fifth of the rows is held out.
"""

import zlib
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware.collective_profile import SizeCurve, SwitchCurve, hops, sent_fraction
from simulator.work import CollectiveKind

_BOUNDS = {
    "launch_us": (8.0, 0.1, 1e3),
    "member_us": (1.0, 1e-3, 1e3),
    "hop_us": (1.0, 1e-3, 1e2),
    "half_size_mb": (5.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (250.0, 0.1, 1e4),
    "small_group_loss": (0.3, 1e-3, 1.5),
    "sharing": (0.5, 1e-3, 1.5),
}
"""Start, lower and upper bound of each parameter."""

_SWITCHED = ("launch_us", "hop_us", "half_size_mb", "bandwidth_gb_per_s", "small_group_loss")
"""Parameters of the curve of links to a switch."""

_LARGE_ERROR = 0.1
"""Mean error of that curve above which other curves are tried."""

_IMPROVEMENT = 0.9
"""Factor by which another curve's cross-validation error has to be smaller."""

_FOLDS = 5
_OUTLIER = 0.05
"""Relative error above which errors count linearly, not squared."""

_HASHED_KIND = {"collective_permute": "permute"}
"""Names of kinds in the hash that holds rows out.

A former name keeps the rows that earlier fits held out.
"""


@dataclass(frozen=True, slots=True)
class MeasuredCollectives:
    """Measurements of one kind of collective, as arrays of one length.

    Attributes:
        kind: the kind.
        size: group sizes.
        num_bytes: bytes of the whole array, as in `simulator.work.Collective`.
        seconds: durations.
    """

    kind: CollectiveKind
    size: NDArray[np.int64]
    num_bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, kind: CollectiveKind, size: ArrayLike, num_bytes: ArrayLike, seconds: ArrayLike):
        """Return measurements from array-likes; a `ValueError` if their lengths differ."""
        measured = cls(
            kind,
            np.asarray(size, np.int64),
            np.asarray(num_bytes, np.float64),
            np.asarray(seconds, np.float64),
        )
        if not len(measured.size) == len(measured.num_bytes) == len(measured.seconds):
            raise ValueError(
                f"{len(measured.size)} sizes and {len(measured.seconds)} times; expected as many"
            )
        return measured

    def __getitem__(self, rows: NDArray) -> "MeasuredCollectives":
        return MeasuredCollectives(
            self.kind, self.size[rows], self.num_bytes[rows], self.seconds[rows]
        )

    def held_out(self) -> NDArray[np.bool_]:
        """Return which rows are held out of the fit: a fifth, by the CRC of kind, size and bytes.

        None are where too few rows would be left.
        """
        kind = _HASHED_KIND.get(self.kind, self.kind)
        rows = zip(self.size, self.num_bytes, strict=True)
        held_out = np.array(
            [zlib.crc32(f"{kind},{size},{moved:.0f}".encode()) % 5 == 0 for size, moved in rows]
        )
        return held_out if (~held_out).sum() >= len(_SWITCHED) else np.zeros_like(held_out)

    def errors(self, curve: SizeCurve) -> NDArray[np.float64]:
        """Return predicted over measured seconds, minus one."""
        rows = zip(self.size.tolist(), self.num_bytes.tolist(), strict=True)
        predicted = np.array([curve.seconds(self.kind, moved, size) for size, moved in rows])
        return predicted / self.seconds - 1


def fit_curve(measured: MeasuredCollectives) -> SizeCurve:
    """Return the curve that fits one kind of collective, with its error on held-out rows.

    The curve is that of links to a switch. If its mean error is above a tenth, curves are tried
    whose members share their launch or their bandwidth, or with a bandwidth for each group size.
    Cross-validation on the fitted rows chooses; held-out rows are not used.

    Raises:
        ValueError: there are fewer rows to fit than parameters.
    """
    held_out = measured.held_out()
    fitted = measured[~held_out]
    if len(fitted.size) < len(_SWITCHED):
        raise ValueError(
            f"{len(fitted.size)} collectives to fit; expected at least {len(_SWITCHED)}, one per "
            "parameter"
        )
    chosen = _CurveForm(_SWITCHED)
    curve = chosen.fit(fitted)
    if len(set(fitted.size.tolist())) > 1 and np.abs(fitted.errors(curve)).mean() > _LARGE_ERROR:
        error = chosen.validation_error(fitted)
        for _, forms in groupby(_other_forms(fitted), key=lambda form: len(form.parameters)):
            validated = [(form.validation_error(fitted), form) for form in forms]
            best_error, best = min(validated, key=lambda pair: pair[0])
            if best_error < _IMPROVEMENT * error:
                chosen, error = best, best_error
        curve = chosen.fit(fitted)
    error = float(np.abs(measured.errors(curve)[held_out]).mean()) if held_out.any() else None
    return curve.model_copy(update={"held_out_error": error})


def _other_forms(measured: MeasuredCollectives) -> "list[_CurveForm]":
    """Return forms of curves without a switch, those with few parameters first.

    A kind with a single hop has no separate hop time, so its curve may have a time per member
    instead.
    """
    groups = tuple(sorted(set(measured.size.tolist())))
    steps = (
        ("hop_us", "member_us") if hops(measured.kind, 2) == hops(measured.kind, 4) else ("hop_us",)
    )
    forms = (
        _CurveForm(("launch_us", step, "half_size_mb", *bandwidth), sizes)
        for step in steps
        for bandwidth, sizes in (
            (("bandwidth_gb_per_s", "small_group_loss"), ()),
            (("bandwidth_gb_per_s", "sharing"), ()),
            (("bandwidth_gb_per_s",) * len(groups), groups),
        )
        if (step, sizes, bandwidth[-1]) != ("hop_us", (), "small_group_loss")
    )
    fitted_rows = len(measured.size) * (1 - 1 / _FOLDS)
    return sorted(
        (form for form in forms if len(form.parameters) < fitted_rows),
        key=lambda form: len(form.parameters),
    )


@dataclass(frozen=True, slots=True)
class _CurveForm:
    """The parameters of a curve that are fitted.

    Attributes:
        parameters: names of the parameters.
        groups: group sizes of the last parameters, if these are bandwidths by group size.
    """

    parameters: tuple[str, ...]
    groups: tuple[int, ...] = ()

    def curve(self, values: NDArray) -> SizeCurve:
        """Return the curve with values of the parameters."""
        fields = {"hop_us": 0.0} | dict(zip(self.parameters, values.tolist(), strict=True))
        bandwidths = dict(
            zip(self.groups, values[len(values) - len(self.groups) :].tolist(), strict=True)
        )
        return SizeCurve(**fields, group_bandwidth_gb_per_s=bandwidths)  # pyright: ignore[reportArgumentType]

    def fit(self, measured: MeasuredCollectives) -> SizeCurve:
        """Return the curve that fits measurements best, by least squares of the log error."""
        from scipy.optimize import least_squares  # slow to import

        starts, low, high = np.log(np.array([_BOUNDS[name] for name in self.parameters])).T
        if len(set(measured.size.tolist())) < 2:
            # one group size can't separate hops from the launch, nor losses from the bandwidth
            fixed = np.isin(self.parameters, ["member_us", "hop_us", "small_group_loss", "sharing"])
            starts = np.where(fixed, low + 1e-6, starts)
        sent = (
            np.array([sent_fraction(measured.kind, n) for n in measured.size.tolist()])
            * measured.num_bytes
        )
        steps = np.array([hops(measured.kind, n) for n in measured.size.tolist()])

        def residuals(values: NDArray) -> NDArray:
            curve = self.curve(np.exp(values))
            bandwidth = np.array([curve.bandwidth(n) for n in measured.size.tolist()])
            latency = (
                curve.launch_us + (measured.size - 1) * curve.member_us + steps * curve.hop_us
            ) * 1e-6
            moved = (sent + np.sqrt(sent * curve.half_size_mb * 1e6)) / bandwidth
            return np.log((latency + moved) / measured.seconds)

        solution = least_squares(
            residuals, starts, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, max_nfev=300
        )
        return self.curve(np.exp(solution.x))

    def validation_error(self, measured: MeasuredCollectives) -> float:
        """Return the cross-validation error: that on each fifth after a fit to the other rows."""
        fold = np.arange(len(measured.size)) % _FOLDS
        errors = [measured[fold == k].errors(self.fit(measured[fold != k])) for k in range(_FOLDS)]
        return float(np.abs(np.concatenate(errors)).mean())


_SWITCH_PARAMETERS = {
    "launch_us": (30.0, 0.1, 1e3),
    "half_size_mb": (1.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (300.0, 0.1, 1e4),
}
"""Start, lower and upper bound of each parameter of `SwitchCurve`."""


def fit_switch(measured: MeasuredCollectives, ring: SizeCurve | None) -> SwitchCurve:
    """Return the curve of all_reduces that the switch sums, with its error on held-out rows.

    Args:
        measured: all_reduces, each of which uses the faster of the switch and a ring.
        ring: the curve of rings; None if all of them use the switch.

    Raises:
        ValueError: there are fewer rows to fit than parameters.
    """
    from scipy.optimize import least_squares  # slow to import

    held_out = measured.held_out()
    if (~held_out).sum() < len(_SWITCH_PARAMETERS):
        raise ValueError(
            f"{(~held_out).sum()} all_reduces to fit; expected at least {len(_SWITCH_PARAMETERS)}"
        )
    rows = list(zip(measured.size.tolist(), measured.num_bytes.tolist(), strict=True))
    rings = np.array(
        [np.inf if ring is None else ring.seconds("all_reduce", moved, n) for n, moved in rows]
    )
    starts, low, high = np.log(np.array(list(_SWITCH_PARAMETERS.values()))).T

    def curve(values: NDArray) -> SwitchCurve:
        return SwitchCurve(**dict(zip(_SWITCH_PARAMETERS, np.exp(values).tolist(), strict=True)))

    def residuals(values: NDArray) -> NDArray:
        switch = curve(values)
        return np.log(
            np.minimum(rings, [switch.seconds(moved, n) for n, moved in rows]) / measured.seconds
        )

    solution = least_squares(
        lambda values: residuals(values)[~held_out],
        starts,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    error = (
        float(np.abs(np.expm1(residuals(solution.x)))[held_out].mean()) if held_out.any() else None
    )
    return curve(solution.x).model_copy(update={"held_out_error": error})
