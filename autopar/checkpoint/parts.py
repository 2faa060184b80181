"""What one process writes of a checkpoint, and what it reads: tiles of arrays, kept by Orbax.

No process waits for another in here, so one that dies takes nobody with it.
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
from autopar.lowering.cross_mesh_resharding import Tile

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

_READ_BYTES = 1 << 30
"""How much is in host memory at a time while arrays are restored, unless one array is larger."""
_SAID = 300
"""How many characters of an error of Orbax an error shows."""


def tile_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Tile:
    """A shard's index as JAX has it, in numbers; None: everything."""
    if index is None:
        return tuple((0, size) for size in shape)
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def copied(array: jax.Array | np.ndarray, tiles: Iterable[Tile]) -> list[np.ndarray]:
    """Shards of an array as host memory that is nobody else's: what was saved may be donated at once."""
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


def in_part(part: str, found: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return checksums by part and name."""
    return {(part, name): checksum for name, checksum in found.items()}


def write(folder: Path, arrays: Mapping[str, np.ndarray], verify: bool = True) -> dict[str, int]:
    """Keep arrays in a new folder, by name, and return their checksums.

    Args:
        verify: whether to read back what was written.

    Raises:
        CheckpointError: what was read back is something else.
    """
    from orbax.checkpoint.args import PyTreeSave

    found = checksums(arrays)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=PyTreeSave(dict(arrays)))
    if verify:
        for names in _groups(arrays, lambda name: arrays[name].nbytes):
            back = checksums(read(folder, names))
            if wrong := [name for name in names if back[name] != found[name]]:
                raise CheckpointError(
                    f"{folder} was written, but {len(wrong)} of its arrays are read back with other numbers: the file system or the memory"
                    " of this host is not to be trusted; save to another directory"
                )
    return found


def read(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays that were kept in a folder.

    Raises:
        DamagedCheckpointError: they can't be read.
    """
    import orbax.checkpoint as ocp

    each = ocp.RestoreArgs(restore_type=np.ndarray)
    wanted = dict.fromkeys(names, each)
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
        except Exception as error:  # Orbax and TensorStore raise all kinds for damaged files
            said = (str(error).splitlines() or [""])[0]
            raise DamagedCheckpointError(
                f"{folder} can't be read: {type(error).__name__}: {said[:_SAID]}"
            ) from error


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array to restore, and its sharding; None for host memory."""

    saved: SavedArray
    sharding: Sharding | None


def restore(folder: Path, wanted: Sequence[Wanted], verify: bool = True) -> list[Any]:
    """Read arrays of a checkpoint onto the devices of this process; only the pieces that these need are read.

    Args:
        verify: whether to compare checksums.

    Raises:
        DamagedCheckpointError: a piece can't be read, or is not what was saved.
    """
    made: list[Any] = []
    for group in _groups(wanted, lambda each: _nbytes(each.saved)):
        needed: dict[str, set[str]] = defaultdict(set)
        for each in group:
            for piece in _needed(each):
                needed[piece.part].add(piece.name)
        pieces = {
            (part, name): value
            for part, names in needed.items()
            for name, value in read(folder / part, sorted(names)).items()
        }
        found = checksums(pieces) if verify else {}
        for each in group:
            _check(folder, each, pieces, found)
        made += [_made(each, pieces) for each in group]
    return made


def _check(
    folder: Path,
    wanted: Wanted,
    pieces: Mapping[tuple[str, str], np.ndarray],
    found: Mapping[tuple[str, str], int],
) -> None:
    """Raise DamagedCheckpointError unless the pieces that were read of an array are those that were saved."""
    saved = wanted.saved
    for piece in _needed(wanted):
        value, checksum = pieces[piece.part, piece.name], found.get((piece.part, piece.name))
        shape = tuple(stop - start for start, stop in piece.tile)
        if value.shape != shape or value.dtype != np.dtype(saved.dtype):
            said = f"{value.dtype}{list(value.shape)}, expected {saved.dtype}{list(shape)}"
        elif None not in (checksum, piece.checksum) and checksum != piece.checksum:
            said = "not what was saved: its checksum is another"
        else:
            continue
        raise DamagedCheckpointError(
            f"{folder / piece.part} is damaged: tile {piece.tile} of {saved.path} is {said}"
        )


def _needed(wanted: Wanted) -> list[SavedPiece]:
    """The pieces of an array that some device here needs something of."""
    saved = wanted.saved
    if wanted.sharding is None:
        return list(saved.pieces)
    here = wanted.sharding.addressable_devices_indices_map(saved.shape).values()
    tiles = {tile_of(index, saved.shape) for index in here}
    return [
        piece
        for piece in saved.pieces
        if any(_common(piece.tile, tile) is not None for tile in tiles)
    ]


def _made(wanted: Wanted, pieces: Mapping[tuple[str, str], np.ndarray]) -> Any:
    saved = wanted.saved

    def part(index: Sequence[slice] | None) -> np.ndarray:
        return _filled(tile_of(index, saved.shape), saved, pieces)

    if wanted.sharding is None:
        return part(None)
    dtype = saved.jax_dtype
    return jax.make_array_from_callback(
        saved.shape, wanted.sharding, lambda index: part(index).astype(dtype), dtype
    )


def _filled(
    tile: Tile, saved: SavedArray, pieces: Mapping[tuple[str, str], np.ndarray]
) -> np.ndarray:
    """A tile, of what pieces have in common with it."""
    made = np.empty([stop - start for start, stop in tile], saved.dtype)
    for piece in saved.pieces:
        if (common := _common(piece.tile, tile)) is not None:
            made[_within(common, tile)] = pieces[piece.part, piece.name][
                _within(common, piece.tile)
            ]
    return made


def _common(one: Tile, other: Tile) -> Tile | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(inner: Tile, outer: Tile) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(inner, outer, strict=True)
    )


def _groups[T](items: Iterable[T], nbytes: Callable[[T], int]) -> list[list[T]]:
    """Items in their order, as many together as host memory should hold."""
    groups: list[list[T]] = []
    room = 0
    for each in items:
        size = nbytes(each)
        if size > room or not groups:
            groups.append([])
            room = _READ_BYTES
        groups[-1].append(each)
        room -= size
    return groups


def _nbytes(saved: SavedArray) -> int:
    return prod(saved.shape) * np.dtype(saved.dtype).itemsize


def _checkpointer() -> "Checkpointer":
    """Orbax for this process alone, also where it is one of several that share meshes."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.multihost import multihost

    if jax.process_count() > 1:
        # Orbax lets process 0 alone write host memory, taking it to be the same in all. (A private name, seen in 0.12.8.)
        multihost.process_index = lambda: 0
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
