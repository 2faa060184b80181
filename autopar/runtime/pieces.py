"""Pieces of shards: programs that cut a shard into tiles, or join tiles to a shard."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar.devices import Device
from autopar.lowering.cross_mesh_resharding import Tile, slices_within, tile_shape


def cutting(
    wanted: Sequence[Tile], present: Tile, dtype: jnp.dtype, device: Device
) -> Callable[..., list]:
    """Return a compiled function that cuts tiles out of a shard.

    Args:
        wanted: the tiles, inside the shard.
        present: the tile of the whole array that the shard is.
        dtype: dtype of the array.
        device: the device of the shard.
    """
    if all(tile == present for tile in wanted):
        return lambda shard: [shard] * len(wanted)
    slices = [slices_within(tile, present) for tile in wanted]
    cut = jax.jit(lambda shard: [shard[index] for index in slices])
    return cut.lower(_on(device, present, dtype)).compile()


def joining(parts: Sequence[Tile], dtype: jnp.dtype, device: Device) -> Callable[[list], jax.Array]:
    """Return a compiled function that joins tiles to a shard.

    Args:
        parts: the tiles, a grid that fills the shard.
        dtype: dtype of the array.
        device: the device of the shard.
    """
    if len(parts) == 1:
        return lambda values: values[0]
    joined = partial(_joined, list(parts), 0)
    return jax.jit(joined).lower([_on(device, part, dtype) for part in parts]).compile()


def _joined(parts: list[Tile], dim: int, values: list[jax.Array]) -> jax.Array:
    """Concatenate the tiles of a grid along `dim`, after concatenating along the dims behind it."""
    if len(parts) == 1:
        return values[0]

    def start(part: tuple[Tile, jax.Array]) -> int:
        return part[0][dim][0]

    ordered = sorted(zip(parts, values, strict=True), key=start)
    rows = []
    for _, same_start in groupby(ordered, key=start):
        row = list(same_start)
        tiles = [tile for tile, _ in row]
        rows.append(_joined(tiles, dim + 1, [value for _, value in row]))
    return jnp.concatenate(rows, dim)


def _on(device: Device, tile: Tile, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tile_shape(tile), dtype, sharding=SingleDeviceSharding(device))
