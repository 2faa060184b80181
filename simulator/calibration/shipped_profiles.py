"""Fit the shipped profiles to the measurements that ship with them.

The command is `autopar fit-profiles`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve, fit_switch
from simulator.calibration.fit_products import fit_gemms
from simulator.calibration.measured_samples import (
    GPUS,
    collective_kinds,
    measured_collectives,
    measured_gemms,
)
from simulator.files import write_text
from simulator.hardware import collective_profile, kernel_profile
from simulator.hardware.collective_profile import CollectiveProfile
from simulator.hardware.description import Description, read, validate
from simulator.hardware.device import shipped_device


def fit_profiles() -> Iterator[tuple[Path, Description]]:
    """Yield each profile that has shipped measurements, fitted to them, with the path of its file.

    All fits together take about 20 seconds.
    """
    for gpu in GPUS:
        name, measured = measured_gemms(gpu)
        profile = fit_gemms(shipped_device(name), "bf16", measured, max_rows=len(measured.m))
        yield kernel_profile.PROFILES / f"{name}.yaml", profile
    for path in sorted(collective_profile.PROFILES.glob("*.yaml")):
        profile = validate(CollectiveProfile, read(path), path)
        if kinds := collective_kinds(profile.gpu):
            measured = [measured_collectives(profile.gpu, kind) for kind in kinds]
            yield path, profile.model_copy(update=_fitted(profile, measured))


def _fitted(
    profile: CollectiveProfile, measured: Sequence[MeasuredCollectives]
) -> dict[str, Description]:
    """Return a curve for each kind.

    In a profile with `nvls`, the switch sums all_reduces of groups that fill the host; smaller
    groups use rings.
    """
    curves: dict[str, Description] = {}
    for rows in measured:
        if rows.kind != "all_reduce" or profile.nvls is None:
            curves[rows.kind] = fit_curve(rows)
            continue
        fills_host = rows.size == rows.size.max()
        ring = None
        if not fills_host.all():
            ring = curves[rows.kind] = fit_curve(rows[~fills_host])
        curves["nvls"] = fit_switch(rows[fills_host], ring)
    return curves


def write_profile(path: Path, profile: Description) -> None:
    """Write a profile as YAML, with four digits of each number.

    Raises:
        FileError: the file can't be written.
    """
    write_text(
        path,
        yaml.safe_dump(_rounded(profile.model_dump(exclude_none=True)), sort_keys=False, width=130),
    )


def _rounded(value: object) -> object:
    """Return fields with rounded numbers, without empty sections."""
    match value:
        case dict():
            return {key: _rounded(item) for key, item in value.items() if item != {}}
        case float():
            return float(f"{value:.4g}")
        case _:
            return value
