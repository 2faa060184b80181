"""Collectives inside a `jax.shard_map` region.

They have no sharding rule: the region is kept as the user wrote it.
"""

from autopar.primitives.registry import PrimitiveRecord

_ALL_REDUCE = PrimitiveRecord(collective="all_reduce")
_ALL_GATHER = PrimitiveRecord(collective="all_gather")

RECORDS = {
    "all_gather": _ALL_GATHER,
    "all_gather_invariant": _ALL_GATHER,
    "all_to_all": PrimitiveRecord(collective="all_to_all"),
    "pmax": _ALL_REDUCE,
    "pmin": _ALL_REDUCE,
    "ppermute": PrimitiveRecord(collective="collective_permute"),
    "psum": _ALL_REDUCE,
    "psum2": _ALL_REDUCE,
    "psum_invariant": _ALL_REDUCE,
    "reduce_scatter": PrimitiveRecord(collective="reduce_scatter"),
}
