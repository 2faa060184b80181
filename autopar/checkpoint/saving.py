"""Saving a state: values are copied at once, and written while the next steps run, if one likes."""

import atexit
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
from autopar.ir.keys import is_key
from autopar.lowering.cross_mesh_resharding import Tile
from autopar.progress import log_progress

_HERE = "driver"
"""The part that this process writes."""

type Writer = Callable[[], Mapping[tuple[str, str], int]]
"""Writes a part, and returns the checksum of each piece by part and name."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
_last: "Saving | None" = None


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: of the state.
    """

    step: int
    _future: Future[Path]

    def wait(self) -> Path:
        """The checkpoint's folder, when it is whole.

        Raises:
            HostLostError, OSError, ...: it could not be written; the ones before it are as they were.
        """
        global _last
        if _last is self:
            _last = None
        return self._future.result()

    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._future.done()


def save_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: Any,
    step: int,
    *,
    keep: int | None = None,
    wait: bool = True,
    verify: bool = True,
) -> Saving:
    """Save a state to `ckpt_dir/<step>`, from where it is: on this process's devices, or on those of other hosts.

    A process that is killed while it writes leaves the checkpoints before this one as they were.

    Args:
        ckpt_dir: all hosts see it, if the state is on other hosts.
        target: a pytree of arrays and numbers.
        keep: how many checkpoints stay in the directory, the last ones; all by default.
        wait: until it is written. If not, this returns when the values are copied, so that the step may go on with the state, and
            donate it; they are written meanwhile. The next save or restore, and `autopar.shutdown`, wait for it; a program that
            ends without either has to, with `Saving.wait`.
        verify: whether to read back what was written and compare its checksums.

    Raises:
        CheckpointError: there is a checkpoint of this step already, there is nothing to save, a leaf is no array, another process
            saves to the directory, or what was written is read back with other numbers.
        HostsError: a host is lost.
        Exception: what the checkpoint before it failed of, if nobody has waited for that.
    """
    global _last
    directory = directory_path(ckpt_dir)
    check_step(step)
    check_keep(keep)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(target)}
    if not leaves:
        raise CheckpointError("the state has no arrays, so there is nothing to save")
    finish_saving()
    with ExitStack() as undo:
        held = lock(directory)
        undo.callback(held.release)
        folder = begin(directory, int(step))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        arrays, writers = _copy(folder, leaves, verify)
        undo.pop_all()
    _last = saving = Saving(
        int(step), _thread.submit(_write, folder, int(step), arrays, writers, keep, held)
    )
    if wait:
        finish_saving()
    return saving


def finish_saving() -> None:
    """Wait for the checkpoint that is being written, if one is; what it failed of is raised."""
    if _last is not None:
        _last.wait()


def forget_saving() -> None:
    """Wait for the checkpoint that is being written, if one is, and leave it at that if it has failed."""
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
    held: DirectoryLock,
) -> Path:
    try:
        checksums: dict[tuple[str, str], int] = {}
        for writer in writers:
            checksums.update(writer())
        unseen = sorted({part for part, _ in checksums if not (folder / part).is_dir()})
        if unseen:
            raise CheckpointError(
                f"{', '.join(unseen)} wrote to {folder}, but this process does not see it there; save to a directory of a file system"
                " that all hosts share"
            )
        manifest = Manifest(
            step=step, arrays=tuple(array.with_checksums(checksums) for array in arrays)
        )
        held.check()
        return commit(folder, manifest, keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what was committed has another name
        held.release()


def _copy(
    folder: Path, leaves: Mapping[str, Any], verify: bool
) -> tuple[tuple[SavedArray, ...], list[Writer]]:
    """The arrays of the checkpoint, and what writes their values, which are copied now."""
    saved: dict[str, SavedArray] = {}
    here: dict[str, np.ndarray] = {}
    elsewhere: dict[str, ArrayHandle] = {}
    for number, (path, leaf) in enumerate(leaves.items()):
        if isinstance(leaf, ArrayHandle):
            leaf.check()
            elsewhere[path] = leaf
            continue
        array, key = _data(path, leaf)
        tiles = _tiles(array)
        names = [f"{number}.{n}" for n in range(len(tiles))]
        here.update(zip(names, copied(array, tiles), strict=True))
        saved[path] = SavedArray(
            path=path,
            shape=array.shape,
            dtype=str(array.dtype),
            key=key,
            pieces=tuple(
                SavedPiece(tile=t, part=_HERE, name=n) for t, n in zip(tiles, names, strict=True)
            ),
        )
    writers: list[Writer] = (
        [lambda: in_part(_HERE, write(folder / _HERE, here, verify))] if here else []
    )
    for hosts in dict.fromkeys(each.hosts for each in elsewhere.values()):
        mine = {path: each for path, each in elsewhere.items() if each.hosts is hosts}
        pieces, writer = hosts.save(folder.absolute(), mine, verify)
        writers.append(writer)
        for path, each in mine.items():
            array = each.array
            saved[path] = SavedArray(
                path=path,
                shape=array.shape,
                dtype=str(array.dtype),
                key=array.impl,
                pieces=pieces[path],
            )
    return tuple(saved[path] for path in leaves), writers


def _data(path: str, leaf: Any) -> tuple[Any, str | None]:
    """A leaf as an array that can be written; of random keys their data and implementation."""
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
            f"an array of shape {leaf.shape} is on devices of other processes than this one; have the step run on hosts by"
            " autopar.init(cluster='ray'), whose arrays are saved where they are"
        )
    if is_key(leaf.dtype):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    return leaf, None


def _tiles(array: Any) -> list[Tile]:
    """The different shards of an array, without empty ones."""
    shape = array.shape
    found = (
        array.sharding.devices_indices_map(shape).values()
        if isinstance(array, jax.Array)
        else [None]
    )
    tiles = dict.fromkeys(tile_of(index, shape) for index in found)
    return [tile for tile in tiles if all(start < stop for start, stop in tile)]


atexit.register(finish_saving)  # too late to write, since Orbax needs threads, but not to say so
