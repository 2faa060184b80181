"""Seconds of single collectives; `simulator.calibration.tables` fits the simulator's size curves to them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import jax
import numpy as np
import pandas as pd
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar import manual
from autopar.util import benchmark_func
from simulator.calibration.tables import COLUMNS
from simulator.work import CollectiveKind

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
    length = num_bytes // 4
    if num_bytes % (4 * size):
        raise ValueError(f"{num_bytes} bytes can't be split into float32 shards for {size} devices; use a multiple")
    mesh = Mesh(np.array(jax.devices()[:size]), ("i",), axis_types=(AxisType.Auto,))
    along = PartitionSpec("i")
    step = jax.jit(jax.shard_map(partial(_in_a_row, _ONCE[kind]), mesh=mesh, in_specs=along, out_specs=along))
    x = jax.device_put(np.zeros(size * length, np.float32), NamedSharding(mesh, along))

    def run() -> (
        None
    ):  # on CPUs two programs in flight may wait for each other's threads; on GPUs a launch is short beside ten
        jax.block_until_ready(step(x))

    return float(np.median(benchmark_func(run, warmup=2, repeat=repeat, number=number))) / IN_A_ROW


def _in_a_row(once: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, IN_A_ROW, lambda _, x: once(x), x)


def _all_gather(x: jax.Array) -> jax.Array:
    return manual.all_gather(x[: len(x) // jax.lax.axis_size("i")], "i", dim=0)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, manual.reduce_scatter(x, "i", dim=0), (0,))


# Each takes and leaves the whole array, so that one can follow on the other with nothing but a slice in between.
_ONCE: dict[CollectiveKind, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: jax.lax.pcast(manual.all_reduce(x, "i"), "i", to="varying"),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda x: manual.all_to_all(x, "i", split_dim=0, concat_dim=0),
    "permute": lambda x: manual.shift(x, "i"),
}
