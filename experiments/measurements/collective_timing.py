"""Seconds of single collectives; `simulator.calibration.fit_profiles` fits the simulator's size curves to them."""

from collections.abc import Sequence
from typing import get_args

import jax
import numpy as np
import pandas as pd

from autopar.microbenchmarks import collective, repeated
from autopar.util import benchmark_func
from simulator import CollectiveKind
from simulator.calibration import COLUMNS

IN_A_ROW = 10
"""Collectives in one program: what it costs to start a program is shared among them."""


def measure_collectives(
    gpu: str, group_sizes: Sequence[int], num_bytes: Sequence[int], repeat: int, number: int
) -> pd.DataFrame:
    """Run every kind of collective on the first devices that are here.

    Args:
        gpu: what to call the devices in the table.
        group_sizes: how many devices take part.
        num_bytes: bytes per device of the whole array, as in `simulator.work.Collective`.
        repeat, number: the median is taken of `repeat` means over `number` programs.

    Returns:
        Columns gpu, kind, size, bytes, us, like the measurements that come with the simulator.
    """
    rows = [
        (gpu, kind, size, count, 1e6 * _seconds(kind, size, count, repeat, number))
        for kind in get_args(CollectiveKind)
        for size in group_sizes
        for count in num_bytes
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _seconds(kind: CollectiveKind, size: int, num_bytes: int, repeat: int, number: int) -> float:
    benchmark = collective(kind, jax.devices()[:size], num_bytes)
    row = repeated(benchmark)

    def run() -> None:
        # on CPUs two programs in flight may wait for each other's threads; on GPUs a launch is short beside ten collectives
        jax.block_until_ready(row(benchmark.x, IN_A_ROW))

    return float(np.median(benchmark_func(run, warmup=2, repeat=repeat, number=number))) / IN_A_ROW
