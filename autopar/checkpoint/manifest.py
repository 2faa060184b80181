"""Manifests of checkpoints, and the folders of a checkpoint directory."""

import itertools
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Literal, Self

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from autopar.checks import NONE, AllowedValues, checked, integer
from autopar.lowering.cross_mesh_resharding import Tile, tile_shape

_MANIFEST = "manifest.json"
_UNFINISHED = ".saving"
_DAMAGED = ".damaged"


class CheckpointError(ValueError):
    """A checkpoint does not exist or belongs to another state, or its directory can't be used."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, unreadable, or differs from what was saved."""


class SavedPiece(BaseModel):
    """A tile of an array, and the file that stores it.

    Attributes:
        tile: for each dim the start and stop of the tile.
        part: the folder of the process that wrote it.
        name: name of the tile in that folder.
        checksum: CRC-32 of its bytes in row-major order; None in checkpoints of format 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: Tile
    part: str
    name: str
    checksum: int | None = None

    def moved(self, dim: int, offset: int) -> "SavedPiece":
        """Return the same piece, `offset` further along a dim."""
        start, stop = self.tile[dim]
        tile = (*self.tile[:dim], (start + offset, stop + offset), *self.tile[dim + 1 :])
        return self.model_copy(update={"tile": tile})


class SavedArray(BaseModel):
    """An array of the state.

    Attributes:
        path: its path in the state, as `jax.tree_util.keystr` writes it.
        shape: its shape; for random keys the shape of their data.
        dtype: its dtype; for random keys the dtype of their data.
        key: the implementation of random keys; None for other arrays.
        pieces: tiles that fill the array.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    pieces: tuple[SavedPiece, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError):
            raise ValueError(f"{self.path} has no dtype {self.dtype!r}") from None
        for piece in self.pieces:
            within = (
                0 <= start < stop <= size
                for (start, stop), size in zip(piece.tile, self.shape, strict=False)
            )
            if len(piece.tile) != len(self.shape) or not all(within):
                raise ValueError(f"{self.path} of shape {self.shape} has no tile {piece.tile}")
        count = sum(prod(tile_shape(piece.tile)) for piece in self.pieces)
        if count != prod(self.shape):
            raise ValueError(f"{self.path} of shape {self.shape} has pieces of {count} elements")
        return self

    def with_checksums(self, checksums: Mapping[tuple[str, str], int]) -> "SavedArray":
        """Return a copy of the array whose pieces have checksums.

        Args:
            checksums: a checksum for each pair of part and name of a piece.
        """
        pieces = [
            piece.model_copy(update={"checksum": checksums[piece.part, piece.name]})
            for piece in self.pieces
        ]
        return self.model_copy(update={"pieces": tuple(pieces)})

    def window(self, dim: int, start: int, stop: int) -> "SavedArray":
        """Return the part of the array from `start` to `stop` along a dim as an array of its own.

        It keeps the saved tiles, which may reach beyond it.
        """
        overlapping = [
            piece.moved(dim, -start)
            for piece in self.pieces
            if piece.tile[dim][0] < stop and piece.tile[dim][1] > start
        ]
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return self.model_copy(update={"shape": shape, "pieces": tuple(overlapping)})

    @property
    def jax_dtype(self) -> np.dtype:
        """The dtype of a JAX array, which may have fewer bits than one of NumPy or Python."""
        return np.dtype(jax.dtypes.canonicalize_dtype(self.dtype))


class Manifest(BaseModel):
    """The contents of a checkpoint.

    Attributes:
        format: 2; checkpoints of format 1 have no checksums.
        step: number of the step whose state was saved.
        arrays: the arrays of the state.
        checksum: CRC-32 of the rest of the manifest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1, 2] = 2
    step: int
    arrays: tuple[SavedArray, ...]
    checksum: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        pieces = (piece for array in self.arrays for piece in array.pieces)
        if self.format == 2 and any(piece.checksum is None for piece in pieces):
            raise ValueError("a piece has no checksum")
        return self

    def to_json(self) -> str:
        """Return the manifest, with its checksum, as JSON."""
        return self.model_copy(update={"checksum": self._checksum()}).model_dump_json()

    def _checksum(self) -> int:
        return zlib.crc32(self.model_dump_json(exclude={"checksum"}).encode())

    @staticmethod
    def load(directory: Path, step: int) -> "Manifest":
        """Load the manifest of the checkpoint of a step.

        Raises:
            DamagedCheckpointError: it is missing, or differs from what was written.
            CheckpointError: there is no such checkpoint, or this process may not read it.
        """
        file = directory / str(step) / _MANIFEST
        steps = saved_steps(directory)
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"{directory} has no checkpoint of step {step}; its steps are: {listed}"
            )
        try:
            manifest = Manifest.model_validate_json(file.read_bytes())
        except PermissionError as error:
            raise CheckpointError(f"{file} may not be read: {error}") from None
        except OSError as error:
            raise DamagedCheckpointError(f"{file} can't be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            cause = " ".join([".".join(map(str, first["loc"])), first["msg"]]).strip()
            raise DamagedCheckpointError(
                f"{file} is not the manifest of a checkpoint that this version of autopar reads:"
                f" {cause}"
            ) from None
        if manifest.format == 2 and manifest.checksum != manifest._checksum():
            raise DamagedCheckpointError(
                f"{file} is damaged: it does not have the checksum that was written"
            )
        if manifest.step != step:
            raise DamagedCheckpointError(
                f"{file} is the manifest of the checkpoint of another step, {manifest.step}"
            )
        return manifest


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the checkpoints in a directory, in ascending order."""
    directory = directory_path(directory)
    if not directory.is_dir():
        return []
    named = (entry for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir())
    return sorted(int(entry.name) for entry in named if entry.name == str(int(entry.name)))


def directory_path(ckpt_dir: str | os.PathLike[str]) -> Path:
    """Return `ckpt_dir` as a Path; raise TypeError if it is not a path."""
    if not isinstance(ckpt_dir, str | os.PathLike):
        raise TypeError(f"ckpt_dir is {ckpt_dir!r}, expected the path of a directory, e.g. 'run'")
    return Path(ckpt_dir)


def check_step(step: object) -> None:
    """Raise ValueError unless `step` is the number of a step."""
    checked("step", step, AllowedValues("a number from 0", integer(0).take))


def check_keep(keep: object) -> None:
    """Raise ValueError unless `keep` is a number of checkpoints or None."""
    checked(
        "keep",
        keep,
        AllowedValues("a number of checkpoints, or None to keep all", (integer() | NONE).take),
    )


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the step of the last checkpoint in a directory, or None if there is none."""
    return max(saved_steps(directory), default=None)


def begin(directory: Path, step: int, keep: int | None) -> Path:
    """Create a folder for the checkpoint of a step, which counts as a checkpoint after `commit`.

    Also removes unfinished folders of processes that were killed.

    Raises:
        CheckpointError: there is a checkpoint of this step, or `commit` would remove it because
            there are `keep` later ones.
    """
    if (directory / str(step)).exists():
        raise CheckpointError(
            f"{directory} has a checkpoint of step {step} already; remove it, or save to another"
            " directory if this is another run"
        )
    later = [saved for saved in saved_steps(directory) if saved > step]
    if keep is not None and len(later) >= keep:
        raise CheckpointError(
            f"{directory} has checkpoints of the later steps {', '.join(map(str, later))}, so"
            f" keep={keep} would remove step {step}; remove the later ones, or save to"
            " another directory"
        )
    for unfinished in directory.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    folder = directory / f"{step}.{uuid.uuid4().hex[:8]}{_UNFINISHED}"
    folder.mkdir()
    return folder


def set_aside(directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one; return its new path."""
    path = directory / f"{step}{_DAMAGED}"
    numbers = itertools.count(2)
    while path.exists():
        path = directory / f"{step}{_DAMAGED}.{next(numbers)}"
    return (directory / str(step)).rename(path)


def commit(folder: Path, manifest: Manifest, keep: int | None) -> Path:
    """Turn a complete folder into a checkpoint, and remove all checkpoints but the last `keep`.

    Args:
        folder: the folder from `begin`, with all its parts.
        manifest: the manifest to write there.
        keep: number of checkpoints to keep; None for all.

    Returns:
        The path of the checkpoint.
    """
    with (folder / _MANIFEST).open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    directory = folder.parent
    final = folder.rename(directory / str(manifest.step))
    for old in saved_steps(directory)[: -keep if keep else 0]:
        # Removing takes a while, and half a checkpoint must not look like a checkpoint.
        removed = (directory / str(old)).rename(directory / f"{old}{_UNFINISHED}")
        shutil.rmtree(removed, ignore_errors=True)
    return final
