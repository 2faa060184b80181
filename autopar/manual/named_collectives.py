"""The five collectives under the names that plans give them, for use inside `jax.shard_map`.

`axis` is the name of a mesh axis, or a tuple of names: the devices of all these axes together, in
an order in which the index of the first axis changes slowest. In the docstrings `parts` is the list
of the arrays of the n devices along `axis`, in order, and a NumPy expression says what each device
returns.
"""

import jax

type AxisName = str | tuple[str, ...]


def all_reduce(x: jax.Array, axis: AxisName) -> jax.Array:
    """Return the sum of all parts, `sum(parts)`, on every device."""
    return jax.lax.psum(x, axis)


def all_gather(x: jax.Array, axis: AxisName, dim: int) -> jax.Array:
    """Return all parts concatenated, `np.concatenate(parts, dim)`, on every device."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: AxisName, dim: int) -> jax.Array:
    """Return part i of the sum, `np.split(sum(parts), n, dim)[i]`, on device i.

    n must divide the dim.
    """
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: AxisName, split_dim: int, concat_dim: int) -> jax.Array:
    """Return piece i of every part, concatenated, on device i.

    That is `np.concatenate([np.split(part, n, split_dim)[i] for part in parts], concat_dim)`.
    """
    return jax.lax.all_to_all(x, axis, split_axis=split_dim, concat_axis=concat_dim, tiled=True)


def shift(x: jax.Array, axis: AxisName, by: int = 1) -> jax.Array:
    """Return the part of the device `by` places back, `parts[(i - by) % n]`, on device i."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])
