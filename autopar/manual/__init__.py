"""Helpers for SPMD programs that are written by hand inside `jax.shard_map`.

They require `check_vma=True`, the default of shard_map, with which JAX's types say along which mesh
axes a value varies.
"""

from autopar.manual.argument_shardings import shardings
from autopar.manual.flags import XlaFlagError, check_xla_flags
from autopar.manual.gradient_sync import value_and_grad
from autopar.manual.named_collectives import (
    AxisName,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    shift,
)
from autopar.manual.rng import fold_rng_over_axis

__all__ = [
    "AxisName",
    "XlaFlagError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "check_xla_flags",
    "fold_rng_over_axis",
    "reduce_scatter",
    "shardings",
    "shift",
    "value_and_grad",
]
