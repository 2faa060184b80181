"""What a checkpoint says of itself, and which ones a directory has."""

import os
import shutil
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.pipeline.resharding import Tile

_MANIFEST = "manifest.json"
_UNFINISHED = ".saving"


class CheckpointError(ValueError):
    """There is no such checkpoint, or it is of another state."""


class SavedPiece(BaseModel):
    """A tile of an array, and where it is.

    Attributes:
        part: the folder.
        name: of the tile there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: Tile
    part: str
    name: str


class SavedArray(BaseModel):
    """An array of the state, whose pieces fill it.

    Attributes:
        path: where it was in the state, as `jax.tree_util.keystr` writes it.
        key: of random keys, the implementation; shape and dtype are then those of their data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    pieces: tuple[SavedPiece, ...]

    @property
    def jax_dtype(self) -> np.dtype:
        """Of it as a JAX array: numbers of numpy's and Python's have more bits than JAX's."""
        return np.dtype(jax.dtypes.canonicalize_dtype(self.dtype))


class Manifest(BaseModel):
    """All of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int
    arrays: tuple[SavedArray, ...]

    @staticmethod
    def load(directory: Path, step: int) -> "Manifest":
        """That of a step's checkpoint.

        Raises:
            CheckpointError: there is none, or it can't be read.
        """
        file = directory / str(step) / _MANIFEST
        try:
            return Manifest.model_validate_json(file.read_text())
        except FileNotFoundError:
            there = ", ".join(map(str, saved_steps(directory))) or "none"
            raise CheckpointError(f"{directory} has no checkpoint of step {step}; those it has: {there}") from None
        except ValidationError as error:
            raise CheckpointError(
                f"{file} is not the manifest of a checkpoint that this version of autopar reads: {error}"
            ) from None


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps that a directory has checkpoints of, in order."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(each.name) for each in directory.iterdir() if each.name.isdecimal())


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The last step that a directory has a checkpoint of; None if it has none."""
    return max(saved_steps(directory), default=None)


def begin(directory: Path, step: int) -> Path:
    """A new folder to write the checkpoint of a step to, which nobody takes for one until `commit`.

    Raises:
        CheckpointError: there is one of this step already.
    """
    if (directory / str(step)).exists():
        raise CheckpointError(
            f"{directory} has a checkpoint of step {step} already; remove it, or save to another directory if this is another run"
        )
    folder = directory / f"{step}{_UNFINISHED}"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, manifest: Manifest, keep: int | None) -> Path:
    """Make what was written a checkpoint; the `keep` last ones stay, and nothing that was never finished."""
    with (folder / _MANIFEST).open("w") as file:
        file.write(manifest.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    directory = folder.parent
    final = folder.rename(directory / str(manifest.step))
    for unfinished in directory.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for old in saved_steps(directory)[: -keep if keep else 0]:
        # Its name goes first: removing takes a while, and half a checkpoint must not look like one.
        gone = (directory / str(old)).rename(directory / f"{old}{_UNFINISHED}")
        shutil.rmtree(gone, ignore_errors=True)
    return final
