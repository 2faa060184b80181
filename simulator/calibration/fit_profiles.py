"""Fit a profile of collectives to a table of measurements."""

from typing import Any, get_args

import numpy as np
import pandas as pd

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve
from simulator.files import brief, one_line
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink, SizeCurve
from simulator.hardware.description import RENAMED
from simulator.work import CollectiveKind

COLUMNS = ("gpu", "kind", "size", "bytes", "us")
"""Columns of a table of collectives.

They are the device's name, the kind, the group size, bytes of the whole array as in
`simulator.work.Collective`, and microseconds.
"""


def fit_collective_profile(
    table: pd.DataFrame, source: str
) -> tuple[CollectiveProfile, pd.DataFrame]:
    """Return the profile that fits a table of collectives of one device, and its errors.

    Args:
        table: measurements, with the columns `COLUMNS`.
        source: origin of the measurements, for the profile.

    Returns:
        The profile, and a table with a row per kind: numbers of fitted and held-out rows, the mean
        absolute relative error on either, and the largest one on held-out rows.

    Raises:
        ValueError: columns are missing, there are several devices, an unknown kind, or too few rows
            of a kind.
    """
    table = _checked(table)
    curves: dict[str, SizeCurve] = {}
    rows = []
    for kind, group in table.groupby("kind", sort=False):
        measured = MeasuredCollectives.of(kind, group["size"], group["bytes"], group["us"] * 1e-6)  # pyright: ignore[reportArgumentType]
        curve = curves[str(kind)] = fit_curve(measured)
        rows.append({"kind": kind, **_errors(measured, curve)})
    if "all_reduce" not in curves:
        raise ValueError(
            f"no rows of all_reduce, only of {', '.join(curves)}; other kinds without rows take "
            "its curve"
        )
    link = MeasuredLink.of(
        curves["all_reduce"], int(table.loc[table["kind"] == "all_reduce", "size"].max())
    )
    profile: dict[str, Any] = {
        "gpu": table["gpu"].iloc[0],
        "source": source,
        "link": link,
        **curves,
    }
    return CollectiveProfile(**profile), pd.DataFrame(rows)


def _checked(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its numbers as numbers.

    Raises:
        ValueError: see `fit_collective_profile`.
    """
    if missing := [column for column in COLUMNS if column not in table]:
        raise ValueError(
            f"no column {missing[0]!r}; expected {', '.join(COLUMNS)}, given "
            f"{one_line(', '.join(map(str, table)))}"
        )
    for column, least in (("size", 2), ("bytes", 1), ("us", 1e-6)):
        numbers = np.array([_number(value) for value in table[column]], np.float64)
        if (wrong := ~((least <= numbers) & (numbers <= 1e15))).any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"row {row + 1}: {column} is {brief(table[column].tolist()[row])}; expected a "
                f"number of {least:g} to 1e+15"
            )
        table = table.assign(**{column: numbers})
    sizes = table["size"].to_numpy()
    if (is_fraction := sizes % 1 != 0).any():
        row = int(np.argmax(is_fraction))
        raise ValueError(f"row {row + 1}: size is {sizes[row]}; expected a whole number of devices")
    if (unnamed := table["gpu"].isna().to_numpy()).any():
        raise ValueError(f"row {int(np.argmax(unnamed)) + 1}: gpu is empty; expected a name")
    gpus = table["gpu"].astype(str).unique()
    if len(gpus) != 1:
        raise ValueError(
            f"measurements of {one_line(', '.join(map(str, gpus))) or 'no device'}; expected those "
            "of one device"
        )
    kinds = get_args(CollectiveKind)
    if unknown := [kind for kind in table["kind"].unique() if kind not in kinds]:
        renamed = RENAMED.get(unknown[0])
        hint = f"it is called {renamed!r} now; " if renamed in kinds else ""
        raise ValueError(
            f"unknown kind {brief(unknown[0])}; {hint}expected some of {', '.join(kinds)}"
        )
    return table.assign(gpu=table["gpu"].astype(str))


def _errors(measured: MeasuredCollectives, curve: SizeCurve) -> dict[str, Any]:
    """Return the numbers of fitted and held-out rows of a kind, and their errors."""
    errors = np.abs(measured.errors(curve))
    held_out = measured.held_out()
    has_any = held_out.any()
    return {
        "fitted_rows": (~held_out).sum(),
        "held_out_rows": held_out.sum(),
        "fitted_error": errors[~held_out].mean(),
        "held_out_error": errors[held_out].mean() if has_any else None,
        "largest_held_out_error": errors[held_out].max() if has_any else None,
    }


def _number(value: Any) -> float:
    """Return a cell of a table as a number; nan if it is none, or too large for one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
