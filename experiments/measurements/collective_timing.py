"""Timings of single collectives, which the simulator's size curves are fitted to.

`simulator.calibration.fit_collective_profile` fits them.
"""

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
"""Collectives in one program, which share the cost of launching it."""


def measure_collectives(
    gpu: str, group_sizes: Sequence[int], num_bytes: Sequence[int], repeat: int, number: int
) -> pd.DataFrame:
    """Time every kind of collective on the first devices of this process.

    Args:
        gpu: name of the devices in the table.
        group_sizes: numbers of devices that take part.
        num_bytes: bytes of the whole array on each device, as in `simulator.Collective`.
        repeat: number of means that the median is taken of.
        number: programs that each mean is taken over.

    Returns:
        A table with the columns of `fit_collective_profile`: gpu, kind, size, bytes, us.
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
        # It blocks because on CPUs two programs in flight may block each other's threads. On GPUs
        # that costs little, since a launch is short compared with ten collectives.
        jax.block_until_ready(row(benchmark.x, IN_A_ROW))

    return float(np.median(benchmark_func(run, warmup=2, repeat=repeat, number=number))) / IN_A_ROW
