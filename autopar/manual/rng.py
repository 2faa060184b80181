"""Random keys that differ between devices."""

import jax

from autopar.manual.named_collectives import AxisName


def fold_rng_over_axis(key: jax.Array, axis: AxisName) -> jax.Array:
    """Return a key that differs between the devices along `axis`, for dropout on shards.

    Call it inside `jax.shard_map`. Device i along `axis` gets `jax.random.fold_in(key, i)`; the key
    is the same along all other mesh axes.
    """
    return jax.random.fold_in(key, jax.lax.axis_index(axis))
