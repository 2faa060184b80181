"""Saving of states: values are copied during the call, and may be written while steps run."""

import atexit
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.checkpoint.locks import DirectoryLock, lock
from autopar.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    SavedArray,
    SavedPiece,
    begin,
    check_keep,
    check_step,
    commit,
    directory_path,
)
from autopar.checkpoint.parts import copied, in_part, tile_of, write
from autopar.ir.array_handle import ArrayHandle
from autopar.ir.joined_array import JoinedArray
from autopar.ir.keys import is_key
from autopar.lowering.cross_mesh_resharding import Tile
from autopar.progress import log_progress

_DRIVER = "driver"
"""Name of the part that this process writes."""

type Writer = Callable[[], Mapping[tuple[str, str], int]]
"""A function that writes a part and returns a checksum for each pair of part and piece."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: the step of the state.
    """

    step: int
    _future: Future[Path]

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Raises:
            Exception: the error of writing it, such as HostLostError or OSError. The earlier
                checkpoints are unchanged.
        """
        try:
            return self._future.result()
        finally:
            _queue.forget(self)

    def done(self) -> bool:
        """Return whether the checkpoint is complete or has failed."""
        return self._future.done()


class SavingQueue:
    """A thread that writes checkpoints, and the last checkpoint if its result is unknown.

    The next save or restore waits for that checkpoint, so that no error is lost.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
        self._unfinished: Saving | None = None

    def start(self, step: int, write: Callable[[], Path]) -> Saving:
        """Write the checkpoint of a step in the thread."""
        saving = Saving(step, self._thread.submit(write))
        self._unfinished = saving
        return saving

    def forget(self, saving: Saving) -> None:
        """Record that the caller learns the result of a checkpoint."""
        if self._unfinished is saving:
            self._unfinished = None

    def finish(self) -> None:
        """Wait for the last checkpoint, and raise its error, unless its result is known."""
        if self._unfinished is not None:
            self._unfinished.wait()


_queue = SavingQueue()
"""The checkpoints of this process."""

_one_at_a_time = threading.Lock()
"""Held by the thread that begins a checkpoint, which removes unfinished ones."""


def save_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: Any,
    step: int,
    *,
    keep: int | None = None,
    wait: bool = True,
    verify: bool = True,
) -> Saving:
    """Save a state to `ckpt_dir/<step>`, from the devices of this process or of other hosts.

    If the process is killed meanwhile, the earlier checkpoints are unchanged.

    Args:
        ckpt_dir: the directory of the checkpoints. If the state is on other hosts, all hosts must
            see it.
        target: the state, a pytree of arrays and numbers.
        step: the step of the state.
        keep: number of checkpoints to keep in the directory, the last ones; None for all.
        wait: whether to return only after the checkpoint is complete. Otherwise this returns after
            the values are copied, so that a step may donate the state, and a thread writes them.
            The next save or restore and `autopar.shutdown` wait for that thread. A program that
            ends without any of these must call `Saving.wait`.
        verify: whether to read back what was written and compare checksums.

    Raises:
        CheckpointError: there is a checkpoint of this step or are `keep` later ones, the state has
            no arrays, a leaf is not an array, another process saves to the directory, or what was
            read back differs.
        HostsError: a host is lost.
        Exception: the error of the checkpoint before, if its result has not been asked for.
    """
    directory = directory_path(ckpt_dir)
    check_step(step)
    check_keep(keep)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(target)}
    if not leaves:
        raise CheckpointError(
            "the state has no arrays, so there is nothing to save; expected a pytree of arrays, as"
            " the state that a step returns"
        )
    with _one_at_a_time, ExitStack() as undo:
        finish_saving()
        directory_lock = lock(directory)
        undo.callback(directory_lock.release)
        folder = begin(directory, int(step), keep)
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        arrays, writers = _copy(folder, leaves, verify)
        undo.pop_all()
        write = partial(_write, folder, int(step), arrays, writers, keep, directory_lock)
        saving = _queue.start(int(step), write)
    if wait:
        saving.wait()
    return saving


def finish_saving() -> None:
    """Wait for the checkpoint that is being written, if any, and raise its error."""
    _queue.finish()


def forget_saving() -> None:
    """Wait for the checkpoint that is being written, if any, and log its error."""
    try:
        finish_saving()
    except Exception as error:
        log_progress(f"a checkpoint could not be written: {error}")


def _write(
    folder: Path,
    step: int,
    arrays: Sequence[SavedArray],
    writers: Sequence[Writer],
    keep: int | None,
    directory_lock: DirectoryLock,
) -> Path:
    """Write all parts, then turn the folder into a checkpoint."""
    try:
        checksums: dict[tuple[str, str], int] = {}
        for writer in writers:
            checksums.update(writer())
        unseen = sorted({part for part, _ in checksums if not (folder / part).is_dir()})
        if unseen:
            raise CheckpointError(
                f"{', '.join(unseen)} wrote to {folder}, but this process does not see it there;"
                " save to a directory of a file system that all hosts share"
            )
        manifest = Manifest(
            step=step, arrays=tuple(array.with_checksums(checksums) for array in arrays)
        )
        directory_lock.check()
        return commit(folder, manifest, keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a complete checkpoint has another name
        directory_lock.release()


def _copy(
    folder: Path, leaves: Mapping[str, Any], verify: bool
) -> tuple[tuple[SavedArray, ...], list[Writer]]:
    """Copy the values of a state.

    Args:
        folder: the folder of the checkpoint.
        leaves: the leaves of the state by path.
        verify: whether to read back what is written.

    Returns:
        The arrays of the checkpoint, and functions that write the copies.
    """
    saved: dict[str, SavedArray] = {}
    copies: dict[str, np.ndarray] = {}
    handles: dict[str, ArrayHandle] = {}
    for number, (path, leaf) in enumerate(_single_pieces(leaves).items()):
        if isinstance(leaf, ArrayHandle):
            leaf.check()
            handles[path] = leaf
            continue
        array, key = _data(path, leaf)
        tiles = _tiles(array)
        names = [f"{number}.{n}" for n in range(len(tiles))]
        copies.update(zip(names, copied(array, tiles), strict=True))
        saved[path] = SavedArray(
            path=path,
            shape=array.shape,
            dtype=str(array.dtype),
            key=key,
            pieces=tuple(
                SavedPiece(tile=tile, part=_DRIVER, name=name)
                for tile, name in zip(tiles, names, strict=True)
            ),
        )
    writers: list[Writer] = []
    if copies:
        writers.append(lambda: in_part(_DRIVER, write(folder / _DRIVER, copies, verify)))
    for hosts in dict.fromkeys(handle.hosts for handle in handles.values()):
        group = {path: handle for path, handle in handles.items() if handle.hosts is hosts}
        pieces, writer = hosts.save(folder.absolute(), group, verify)
        writers.append(writer)
        for path, handle in group.items():
            array = handle.array
            saved[path] = SavedArray(
                path=path,
                shape=array.shape,
                dtype=str(array.dtype),
                key=array.impl,
                pieces=pieces[path],
            )
    return tuple(_joined(path, leaf, saved) for path, leaf in leaves.items()), writers


def _single_pieces(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by path, with a path of its own for each piece of a joined array."""
    pieces: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, JoinedArray):
            pieces |= {_piece_path(path, k): piece for k, piece in enumerate(leaf.pieces)}
        else:
            pieces[path] = leaf
    return pieces


def _piece_path(path: str, number: int) -> str:
    return f"{path}#{number}"


def _joined(path: str, leaf: Any, saved: Mapping[str, SavedArray]) -> SavedArray:
    """Return the saved array of a leaf, whose pieces were saved one by one if it is joined."""
    if not isinstance(leaf, JoinedArray):
        return saved[path]
    arrays = [saved[_piece_path(path, k)] for k in range(len(leaf.pieces))]
    of_key = arrays[0].shape[len(leaf.shape) :]  # the dims of the data of a random key
    return arrays[0].model_copy(
        update={
            "path": path,
            "shape": (*leaf.shape, *of_key),
            "pieces": tuple(
                piece.moved(leaf.dim, start)
                for array, start in zip(arrays, leaf.starts, strict=True)
                for piece in array.pieces
            ),
        }
    )


def _data(path: str, leaf: Any) -> tuple[Any, str | None]:
    """Return a leaf as an array that can be written, and the implementation of random keys."""
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        try:
            jax.typeof(array)
        except TypeError:
            raise CheckpointError(
                f"{path} of the state is {leaf!r:.80}, expected an array or a number"
            ) from None
        return array, None
    if not leaf.is_fully_addressable:
        raise CheckpointError(
            f"an array of shape {leaf.shape} is on devices of other processes than this one; have"
            " the step run on hosts by autopar.init(cluster='ray'), whose arrays are saved where"
            " they are"
        )
    if is_key(leaf.dtype):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    return leaf, None


def _tiles(array: Any) -> list[Tile]:
    """Return the tiles of an array's distinct shards that are not empty."""
    shape = array.shape
    if isinstance(array, jax.Array):
        indices: Iterable[Any] = array.sharding.devices_indices_map(shape).values()
    else:
        indices = [None]
    tiles = dict.fromkeys(tile_of(index, shape) for index in indices)
    return [tile for tile in tiles if all(start < stop for start, stop in tile)]


# At exit it is too late to write, since Orbax needs threads, but the error can be reported.
atexit.register(finish_saving)
