"""The part of a checkpoint that one process writes or reads: tiles of arrays, stored with Orbax.

Processes do not wait for each other here, so the death of one does not block the others.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from autopar.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    SavedArray,
    SavedPiece,
)
from autopar.lowering.cross_mesh_resharding import Tile, slices_within, tile_shape

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

_READ_BYTES = 1 << 30
"""Bytes of host memory for arrays during a restore, unless a single array is larger."""

_CAUSE_LENGTH = 300
"""Maximum number of characters of Orbax's error message in an error."""


def tile_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Tile:
    """Return the tile of a shard, given its index in JAX; None stands for the whole array."""
    if index is None:
        return tuple((0, size) for size in shape)
    return tuple(bounds.indices(size)[:2] for bounds, size in zip(index, shape, strict=True))


def copied(array: jax.Array | np.ndarray, tiles: Iterable[Tile]) -> list[np.ndarray]:
    """Return copies of an array's shards in host memory, so that the array may be donated.

    Args:
        array: the array.
        tiles: the tile of each shard.
    """
    if isinstance(array, np.ndarray):
        return [np.array(array) for _ in tiles]
    shards = {tile_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    return [np.array(shards[tile]) for tile in tiles]


def checksums(arrays: Mapping[Any, np.ndarray]) -> dict[Any, int]:
    """Return the CRC-32 of the bytes of each array in row-major order."""
    with ThreadPoolExecutor() as threads:  # zlib releases the GIL
        values = threads.map(
            lambda array: zlib.crc32(array.reshape(-1).view(np.uint8)), arrays.values()
        )
        return dict(zip(arrays, values, strict=True))


def in_part(part: str, by_name: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return the checksums of one part with the part's name added to each key.

    Args:
        part: the name of the part.
        by_name: the checksum of each array of the part by the array's name.
    """
    return {(part, name): checksum for name, checksum in by_name.items()}


def write(folder: Path, arrays: Mapping[str, np.ndarray], verify: bool = True) -> dict[str, int]:
    """Write arrays to a new folder and return their checksums by name.

    Args:
        folder: the folder.
        arrays: the arrays by name.
        verify: whether to read back what was written.

    Raises:
        CheckpointError: they can't be written, or an array that was read back differs.
    """
    from orbax.checkpoint.args import PyTreeSave

    written = checksums(arrays)
    with _checkpointer() as checkpointer:
        try:
            checkpointer.save(folder.absolute(), args=PyTreeSave(dict(arrays)))
        except ValueError as error:  # TensorStore's: a full disk, an unsupported dtype
            raise CheckpointError(f"{folder} can't be written: {_cause(error)}") from error
    if verify:
        for names in _groups(arrays, lambda name: arrays[name].nbytes):
            back = checksums(read(folder, names))
            wrong = [name for name in names if back[name] != written[name]]
            if wrong:
                raise CheckpointError(
                    f"{folder} was written, but {len(wrong)} of its arrays are read back with other"
                    " numbers: the file system or the memory of this host is not to be trusted;"
                    " save to another directory"
                )
    return written


def read(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return arrays of a folder by name.

    Raises:
        DamagedCheckpointError: they can't be read.
        CheckpointError: this process may not read them.
    """
    import orbax.checkpoint as ocp

    wanted = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    with _checkpointer() as checkpointer:
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True
        )
        try:
            return checkpointer.restore(folder.absolute(), args=args)
        except MemoryError:
            raise
        except PermissionError as error:
            raise CheckpointError(f"{folder} may not be read: {error}") from error
        except Exception as error:  # Orbax and TensorStore raise many types for damaged files
            raise DamagedCheckpointError(
                f"{folder} can't be read: {type(error).__name__}: {_cause(error)}"
            ) from error


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array to restore.

    Attributes:
        saved: the array as it was saved.
        sharding: its sharding; None for host memory.
    """

    saved: SavedArray
    sharding: Sharding | None


def restore(folder: Path, wanted: Sequence[Wanted], verify: bool = True) -> list[Any]:
    """Restore arrays of a checkpoint, and read only the pieces that this process needs.

    Args:
        folder: the folder of the checkpoint.
        wanted: the arrays and their shardings.
        verify: whether to compare checksums.

    Returns:
        The arrays, which are numpy arrays if they have no sharding.

    Raises:
        DamagedCheckpointError: a piece can't be read, or differs from what was saved.
    """
    arrays: list[Any] = []
    for group in _groups(wanted, lambda array: _nbytes(array.saved)):
        names_of: dict[str, set[str]] = defaultdict(set)
        for array in group:
            for piece in _needed(array):
                names_of[piece.part].add(piece.name)
        pieces = {
            (part, name): value
            for part, names in names_of.items()
            for name, value in read(folder / part, sorted(names)).items()
        }
        actual = checksums(pieces) if verify else {}
        for array in group:
            _check(folder, array, pieces, actual)
        arrays += [_restored(array, pieces) for array in group]
    return arrays


def _check(
    folder: Path,
    wanted: Wanted,
    pieces: Mapping[tuple[str, str], np.ndarray],
    actual: Mapping[tuple[str, str], int],
) -> None:
    """Raise DamagedCheckpointError if a piece that was read differs from what was saved."""
    saved = wanted.saved
    for piece in _needed(wanted):
        value = pieces[piece.part, piece.name]
        checksum = actual.get((piece.part, piece.name))
        shape = tile_shape(piece.tile)
        if value.shape != shape or value.dtype != np.dtype(saved.dtype):
            damage = f"{value.dtype}{list(value.shape)}, expected {saved.dtype}{list(shape)}"
        elif None not in (checksum, piece.checksum) and checksum != piece.checksum:
            damage = "not what was saved: its checksum is another"
        else:
            continue
        raise DamagedCheckpointError(
            f"{folder / piece.part} is damaged: tile {piece.tile} of {saved.path} is {damage}"
        )


def _needed(wanted: Wanted) -> list[SavedPiece]:
    """Return the pieces of an array that overlap a shard of this process."""
    saved = wanted.saved
    if wanted.sharding is None:
        return list(saved.pieces)
    indices = wanted.sharding.addressable_devices_indices_map(saved.shape).values()
    tiles = {tile_of(index, saved.shape) for index in indices}
    return [
        piece
        for piece in saved.pieces
        if any(_common(piece.tile, tile) is not None for tile in tiles)
    ]


def _restored(wanted: Wanted, pieces: Mapping[tuple[str, str], np.ndarray]) -> Any:
    saved = wanted.saved

    def part(index: Sequence[slice] | None) -> np.ndarray:
        return _filled(tile_of(index, saved.shape), saved, pieces)

    if wanted.sharding is None:
        return part(None)
    dtype = saved.jax_dtype

    def jax_part(index: Sequence[slice] | None) -> np.ndarray:
        values = part(index)
        narrow = values.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(narrow, values):
            raise CheckpointError(
                f"{saved.path} has numbers beyond the range of {dtype}, and was saved as"
                f" {saved.dtype}: restore it with jax.config.update('jax_enable_x64', True)"
            )
        return narrow

    return jax.make_array_from_callback(saved.shape, wanted.sharding, jax_part, dtype)


def _filled(
    tile: Tile, saved: SavedArray, pieces: Mapping[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """Return a tile, filled from the pieces that overlap it."""
    values = np.empty(tile_shape(tile), saved.dtype)
    for piece in saved.pieces:
        common = _common(piece.tile, tile)
        if common is not None:
            source = pieces[piece.part, piece.name]
            values[slices_within(common, tile)] = source[slices_within(common, piece.tile)]
    return values


def _common(one: Tile, other: Tile) -> Tile | None:
    """Return the intersection of two tiles, or None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _groups[T](items: Iterable[T], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Return the items in order, in groups of at most `_READ_BYTES` or one item."""
    groups: list[list[T]] = []
    room = 0
    for item in items:
        size = nbytes(item)
        if size > room or not groups:
            groups.append([])
            room = _READ_BYTES
        groups[-1].append(item)
        room -= size
    return groups


def _cause(error: Exception) -> str:
    """Return the first line of an error of Orbax or TensorStore, in bounded length.

    The end of a long line is kept, which has the reason; the rest is paths.
    """
    line = (str(error).splitlines() or [""])[0]
    return line if len(line) <= _CAUSE_LENGTH else f"... {line[-_CAUSE_LENGTH:]}"


def _nbytes(saved: SavedArray) -> int:
    return prod(saved.shape) * np.dtype(saved.dtype).itemsize


def _checkpointer() -> "Checkpointer":
    """Return Orbax's checkpointer for this process alone, even if processes share meshes."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.multihost import multihost

    if jax.process_count() > 1:
        # Orbax lets only process 0 write host memory, on the assumption that all processes have
        # the same. (A private name, seen in 0.12.8.)
        multihost.process_index = lambda: 0
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
