"""Fits to tables of measurements: what was measured elsewhere becomes a profile."""

from typing import Any, get_args

import numpy as np
import pandas as pd

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve
from simulator.files import brief, one_line
from simulator.hardware.collective_profile import CollectiveProfile, MeasuredLink, SizeCurve
from simulator.hardware.description import RENAMED
from simulator.work import CollectiveKind

COLUMNS = ("gpu", "kind", "size", "bytes", "us")
"""Of a table of collectives: the device's name, the kind, devices in a group, bytes of the whole array as in
`simulator.work.Collective`, microseconds."""


def fit_collective_profile(
    table: pd.DataFrame, source: str
) -> tuple[CollectiveProfile, pd.DataFrame]:
    """The curves of a table of collectives of one device, with the columns `COLUMNS`, and how far off they are.

    Args:
        source: where the numbers come from, for the profile.

    Returns:
        The profile, and a row per kind: how many rows it was fitted to and how many were held out, the mean absolute error on
        either, and the largest on those held out; as parts of the measured time.

    Raises:
        ValueError: columns are missing, there are several devices, an unknown kind, or too few rows of a kind.
    """
    if missing := [column for column in COLUMNS if column not in table]:
        raise ValueError(
            f"no column {missing[0]!r}; expected {', '.join(COLUMNS)}, given {one_line(', '.join(map(str, table)))}"
        )
    for column, least in (("size", 2), ("bytes", 1), ("us", 1e-6)):
        numbers = np.array([_number(value) for value in table[column]], np.float64)
        if (wrong := ~((least <= numbers) & (numbers <= 1e15))).any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"row {row + 1}: {column} is {brief(table[column].tolist()[row])}; expected a number of {least:g} to 1e+15"
            )
        table = table.assign(**{column: numbers})
    gpus = table["gpu"].unique()
    if len(gpus) != 1:
        raise ValueError(
            f"measurements of {one_line(', '.join(map(str, gpus))) or 'nothing'}; expected those of one device"
        )
    kinds = get_args(CollectiveKind)
    if unknown := [kind for kind in table["kind"].unique() if kind not in kinds]:
        renamed = RENAMED.get(unknown[0])
        hint = f"it is called {renamed!r} now; " if renamed in kinds else ""
        raise ValueError(
            f"unknown kind {brief(unknown[0])}; {hint}expected some of {', '.join(kinds)}"
        )
    curves: dict[str, SizeCurve] = {}
    rows = []
    for kind, group in table.groupby("kind", sort=False):
        measured = MeasuredCollectives.of(kind, group["size"], group["bytes"], group["us"] * 1e-6)  # pyright: ignore[reportArgumentType]
        curve = curves[str(kind)] = fit_curve(measured)
        errors, held = np.abs(measured.errors(curve)), measured.held_out()
        of_held = (errors[held].mean(), errors[held].max()) if held.any() else (None, None)
        rows.append((kind, (~held).sum(), held.sum(), errors[~held].mean(), *of_held))
    columns = [
        "kind",
        "fitted_rows",
        "held_out_rows",
        "fitted_error",
        "held_out_error",
        "largest_held_out_error",
    ]
    if "all_reduce" not in curves:
        raise ValueError(
            f"no rows of all_reduce, only of {', '.join(curves)}; other kinds without rows take its curve"
        )
    link = MeasuredLink.of(
        curves["all_reduce"], int(table.loc[table["kind"] == "all_reduce", "size"].max())
    )
    profile: dict[str, Any] = {"gpu": gpus[0], "source": source, "link": link, **curves}
    return CollectiveProfile(**profile), pd.DataFrame(rows, columns=columns)


def _number(value: Any) -> float:
    """Return a cell of a table as a number; nan where it is none, or too large for one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
