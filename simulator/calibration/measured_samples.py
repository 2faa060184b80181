"""Shipped samples of measured products and collectives.

`simulator/validation/data/README.md` lists their origins.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from simulator.calibration.fit_collectives import MeasuredCollectives
from simulator.calibration.fit_products import MeasuredGemms
from simulator.work import CollectiveKind

DATA = Path(__file__).parent.parent / "validation" / "data"

GPUS = {
    "a100": "a100_sxm4_80gb",
    "h100": "h100_sxm5_80gb",
    "h200": "h200_sxm_141gb",
    "b200": "b200_sxm_180gb",
}
"""Names of kernel profiles by GPU with measured products."""


def measured_gemms(gpu: str) -> tuple[str, MeasuredGemms]:
    """Return the name of the profile of a GPU and its measured products.

    Raises:
        ValueError: the GPU is none of `GPUS`.
    """
    if gpu not in GPUS:
        raise ValueError(f"no measured products of {gpu!r}; there are some of {', '.join(GPUS)}")
    rows = np.loadtxt(DATA / f"gemm_{gpu}.csv", delimiter=",", skiprows=1)
    return GPUS[gpu], MeasuredGemms.of(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] * 1e-6)


def measured_collectives(gpu: str, kind: CollectiveKind) -> MeasuredCollectives:
    """Return the measured collectives of one kind within a host.

    Args:
        gpu: name of the device.
        kind: kind of the collectives.

    Raises:
        ValueError: there are none.
    """
    rows = pd.read_csv(DATA / "collectives.csv")
    rows = rows[(rows.gpu == gpu) & (rows.kind == kind)]
    if rows.empty:
        known = ", ".join(collective_kinds(gpu)) or "none"
        raise ValueError(f"no measured {kind} of {gpu!r}; measured collectives: {known}")
    return MeasuredCollectives.of(kind, rows["size"], rows["bytes"], rows["us"] * 1e-6)


def collective_kinds(gpu: str) -> tuple[CollectiveKind, ...]:
    """Return the kinds of collectives that were measured on a device."""
    rows = pd.read_csv(DATA / "collectives.csv")
    return tuple(rows[rows.gpu == gpu].kind.unique())
