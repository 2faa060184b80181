"""The five collectives under the names that plans give them, on array dims. To be called inside `jax.shard_map`.

`axis` is the name of a mesh axis, or a tuple of names: then the devices of all of them together, the first name slowest. With
`parts` the list of the arrays that the n devices along it hold, in order, each device gets what its NumPy line says.
"""

import jax

type AxisName = str | tuple[str, ...]


def all_reduce(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum of all parts: `sum(parts)`, the same on every device."""
    return jax.lax.psum(x, axis)


def all_gather(x: jax.Array, axis: AxisName, dim: int) -> jax.Array:
    """All parts one after the other: `np.concatenate(parts, dim)`."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: AxisName, dim: int) -> jax.Array:
    """Part i of the sum: `np.split(sum(parts), n, dim)[i]` on device i. n must divide the dim."""
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: AxisName, split_dim: int, concat_dim: int) -> jax.Array:
    """Everybody's piece for me: `np.concatenate([np.split(part, n, split_dim)[i] for part in parts], concat_dim)` on device i."""
    return jax.lax.all_to_all(x, axis, split_axis=split_dim, concat_axis=concat_dim, tiled=True)


def shift(x: jax.Array, axis: AxisName, by: int = 1) -> jax.Array:
    """What the device `by` places back in the ring holds: `parts[(i - by) % n]` on device i."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])
