"""Shards in pieces: what cuts them where they are, and puts them together where they go."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar.devices import Device
from autopar.lowering.cross_mesh_resharding import Tile


def cutting(
    wanted: Sequence[Tile], held: Tile, dtype: jnp.dtype, device: Device
) -> Callable[..., list]:
    """What cuts tiles out of a shard, on its device."""
    if all(tile == held for tile in wanted):
        return lambda shard: [shard] * len(wanted)
    slices = [
        tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(tile, held, strict=True)
        )
        for tile in wanted
    ]
    return (
        jax.jit(lambda shard: [shard[each] for each in slices])
        .lower(_on(device, held, dtype))
        .compile()
    )


def joining(parts: Sequence[Tile], dtype: jnp.dtype, device: Device) -> Callable[[list], jax.Array]:
    """What makes a shard of the tiles that fill it, on its device."""
    if len(parts) == 1:
        return lambda given: given[0]
    joined = partial(_joined, list(parts), 0)
    return jax.jit(joined).lower([_on(device, part, dtype) for part in parts]).compile()


def _joined(parts: list[Tile], dim: int, values: list[jax.Array]) -> jax.Array:
    """The tiles of a grid put together: along `dim` what is put together along the dims after it."""
    if len(parts) == 1:
        return values[0]
    ordered = sorted(zip(parts, values, strict=True), key=lambda each: each[0][dim])
    rows = [list(row) for _, row in groupby(ordered, key=lambda each: each[0][dim])]
    return jnp.concatenate(
        [_joined([t for t, _ in row], dim + 1, [v for _, v in row]) for row in rows], dim
    )


def _on(device: Device, tile: Tile, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    shape = tuple(stop - start for start, stop in tile)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
