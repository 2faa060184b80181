"""Fits the size curve of a kind of collective within a host to measured times, robust to outliers; a fifth of the rows is held out."""

import zlib
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from simulator.hardware.collective_profile import SizeCurve, SwitchCurve, hops, sent_fraction
from simulator.work import CollectiveKind

_BOUNDS = {  # start and bounds
    "launch_us": (8.0, 0.1, 1e3),
    "member_us": (1.0, 1e-3, 1e3),
    "hop_us": (1.0, 1e-3, 1e2),
    "half_size_mb": (5.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (250.0, 0.1, 1e4),
    "small_group_loss": (0.3, 1e-3, 1.5),
    "sharing": (0.5, 1e-3, 1.5),
}
_USUAL = ("launch_us", "hop_us", "half_size_mb", "bandwidth_gb_per_s", "small_group_loss")
_OFF = 0.1  # mean error of the usual curve above which others are tried
_BETTER = 0.9  # of its error on rows left out of its fit, which another one's must stay under
_FOLDS = 5
_OUTLIER = 0.05
_HASHED_KIND = {"collective_permute": "permute"}
"""Names of kinds in the hash that holds rows out, where they differ. The name from before a renaming keeps the split of earlier fits."""


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
        """Which rows are for checking only: a fifth, by the CRC of kind, size and bytes; none, where too few to fit would be left."""
        kind = _HASHED_KIND.get(self.kind, self.kind)
        rows = zip(self.size, self.num_bytes, strict=True)
        held = np.array(
            [zlib.crc32(f"{kind},{size},{moved:.0f}".encode()) % 5 == 0 for size, moved in rows]
        )
        return held if (~held).sum() >= len(_USUAL) else np.zeros_like(held)

    def errors(self, curve: SizeCurve) -> NDArray[np.float64]:
        """Predicted over measured, minus one."""
        rows = zip(self.size.tolist(), self.num_bytes.tolist(), strict=True)
        return (
            np.array([curve.seconds(self.kind, moved, size) for size, moved in rows]) / self.seconds
            - 1
        )


def fit_curve(measured: MeasuredCollectives) -> SizeCurve:
    """The curve of one kind of collective, with its mean absolute error on the rows that were held out.

    It is that of links to a switch. Where that is off by more than a tenth, members may share what starts them or their bandwidth, or
    each group size may have a bandwidth of its own, if that is better on rows that are left out of the fit in turn; those that were
    held out have no say in it.
    """
    held = measured.held_out()
    fitted = measured[~held]
    if len(fitted.size) < len(_USUAL):
        raise ValueError(
            f"{len(fitted.size)} collectives to fit; expected at least {len(_USUAL)}, one per parameter"
        )
    usual = _Form(_USUAL)
    curve = usual.fit(fitted)
    if len(set(fitted.size.tolist())) > 1 and np.abs(fitted.errors(curve)).mean() > _OFF:
        chosen, error = usual, usual.left_out_error(fitted)
        for _, forms in groupby(_other_forms(fitted), key=lambda form: len(form.parameters)):
            found, best = min(
                ((form.left_out_error(fitted), form) for form in forms), key=lambda pair: pair[0]
            )
            if found < _BETTER * error:
                chosen, error = best, found
        curve = chosen.fit(fitted)
    error = float(np.abs(measured.errors(curve)[held]).mean()) if held.any() else None
    return curve.model_copy(update={"held_out_error": error})


def _other_forms(measured: MeasuredCollectives) -> "list[_Form]":
    """Curves that need not be those of a switch, those of few parameters first.

    Of a kind with a single hop that is part of the launch, so members may cost instead.
    """
    groups = tuple(sorted(set(measured.size.tolist())))
    steps = (
        ("hop_us", "member_us") if hops(measured.kind, 2) == hops(measured.kind, 4) else ("hop_us",)
    )
    forms = (
        _Form(("launch_us", step, "half_size_mb", *bandwidth), sizes)
        for step in steps
        for bandwidth, sizes in (
            (("bandwidth_gb_per_s", "small_group_loss"), ()),
            (("bandwidth_gb_per_s", "sharing"), ()),
            (("bandwidth_gb_per_s",) * len(groups), groups),
        )
        if (step, sizes, bandwidth[-1]) != ("hop_us", (), "small_group_loss")
    )
    enough = len(measured.size) * (1 - 1 / _FOLDS)  # rows that are left where a fifth is left out
    return sorted(
        (form for form in forms if len(form.parameters) < enough),
        key=lambda form: len(form.parameters),
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """Which parameters of a curve are fitted; the bandwidths those of `groups` where there are some."""

    parameters: tuple[str, ...]
    groups: tuple[int, ...] = ()

    def curve(self, values: NDArray) -> SizeCurve:
        fields = {"hop_us": 0.0} | dict(zip(self.parameters, values.tolist(), strict=True))
        bandwidths = dict(
            zip(self.groups, values[len(values) - len(self.groups) :].tolist(), strict=True)
        )
        return SizeCurve(**fields, group_bandwidth_gb_per_s=bandwidths)  # pyright: ignore[reportArgumentType]

    def fit(self, measured: MeasuredCollectives) -> SizeCurve:
        """With the parameters that come nearest to what was measured."""
        starts, low, high = np.log(np.array([_BOUNDS[name] for name in self.parameters])).T
        if (
            len(set(measured.size.tolist())) < 2
        ):  # one group size doesn't tell hops from launch, nor losses from bandwidth
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

    def left_out_error(self, measured: MeasuredCollectives) -> float:
        """The mean absolute error on each fifth of the rows after a fit to the others."""
        fold = np.arange(len(measured.size)) % _FOLDS
        errors = [measured[fold == k].errors(self.fit(measured[fold != k])) for k in range(_FOLDS)]
        return float(np.abs(np.concatenate(errors)).mean())


_SWITCH_PARAMETERS = {  # start and bounds
    "launch_us": (30.0, 0.1, 1e3),
    "half_size_mb": (1.0, 1e-4, 1e3),
    "bandwidth_gb_per_s": (300.0, 0.1, 1e4),
}


def fit_switch(measured: MeasuredCollectives, ring: SizeCurve | None) -> SwitchCurve:
    """The curve of all_reduces that the switch makes where it is faster than `ring`; always, if that is None."""
    held = measured.held_out()
    if (~held).sum() < len(_SWITCH_PARAMETERS):
        raise ValueError(
            f"{(~held).sum()} all_reduces to fit; expected at least {len(_SWITCH_PARAMETERS)}"
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
        lambda values: residuals(values)[~held],
        starts,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    error = float(np.abs(np.expm1(residuals(solution.x)))[held].mean()) if held.any() else None
    return curve(solution.x).model_copy(update={"held_out_error": error})
