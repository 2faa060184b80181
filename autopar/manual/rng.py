"""Random keys that differ between devices."""

import jax

from autopar.manual.named_collectives import AxisName


def fold_rng_over_axis(key: jax.Array, axis: AxisName) -> jax.Array:
    """A key of its own for each device along `axis`, and the same one along all other mesh axes.

    For dropout on shards, say. To be called inside `jax.shard_map`; along the axis, device i gets `jax.random.fold_in(key, i)`.
    """
    return jax.random.fold_in(key, jax.lax.axis_index(axis))
