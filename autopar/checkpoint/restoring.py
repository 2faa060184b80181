"""Restoring of states for any plan, mesh and number of hosts."""

import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.checkpoint.locks import lock
from autopar.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    SavedArray,
    check_step,
    directory_path,
    saved_steps,
    set_aside,
)
from autopar.checkpoint.parts import Wanted, restore
from autopar.checkpoint.saving import finish_saving
from autopar.ir.joined_array import JoinedArray
from autopar.ir.keys import data_aval, impl_of, is_key
from autopar.lowering.placement_specs import JoinedPlacement, PlacementSpec
from autopar.runtime.local_backend import backend

_SHOWN = 5
"""Maximum number of arrays that an error names."""


def restore_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    step: int | None = None,
    placement_specs: Any = None,
    *,
    verify: bool = True,
) -> Any:
    """Restore the state that was saved in `ckpt_dir`, for any plan, mesh and number of hosts.

    Each host reads only what its devices need.

    Args:
        ckpt_dir: the directory of the checkpoints.
        step: the step of the state. By default the last checkpoint that can be read is restored,
            and later ones are renamed to `<step>.damaged` with a warning.
        placement_specs: a pytree like the state with a `PlacementSpec` for every array, such as
            `executable.get_input_placement_specs()[0]`. Arrays on devices of this process may have
            `jax.ShapeDtypeStruct`s with shardings instead.
        verify: whether to compare the data with the checksums that were saved.

    Returns:
        The state. Without `placement_specs`, a dict from the path of each array in the state to a
        numpy array; random keys are returned as their data (`jax.random.key_data`).

    Raises:
        CheckpointError: there is no such checkpoint, it can't be read, or its arrays differ from
            those of `placement_specs`.
        ValueError: a placement is on devices that do not exist, or `step` is negative.
        TypeError: a leaf of `placement_specs` is not a placement.
    """
    if step is None:
        return restore_last(ckpt_dir, placement_specs, verify)[1]
    check_step(step)
    finish_saving()
    return _restored(directory_path(ckpt_dir), int(step), placement_specs, verify)


def restore_last(
    ckpt_dir: str | os.PathLike[str], placement_specs: Any, verify: bool = True
) -> tuple[int, Any]:
    """Restore the last checkpoint that can be read; set later ones aside with a warning.

    Args:
        ckpt_dir: the directory of the checkpoints.
        placement_specs: as in `restore_checkpoint`.
        verify: whether to compare checksums.

    Returns:
        The checkpoint's step and the state.

    Raises:
        CheckpointError: as in `restore_checkpoint`.
    """
    finish_saving()
    directory = directory_path(ckpt_dir)
    damaged: dict[int, DamagedCheckpointError] = {}
    for step in reversed(saved_steps(directory)):
        try:
            state = _restored(directory, step, placement_specs, verify)
        except DamagedCheckpointError as error:
            # Otherwise a process that saves has removed the checkpoint meanwhile.
            if (directory / str(step)).exists():
                damaged[step] = error
        else:
            _set_aside(directory, damaged, step)
            return step, state
    if damaged:
        causes = "; ".join(map(str, damaged.values()))
        raise CheckpointError(
            f"{directory} has no checkpoint that can be read: {causes}"
        ) from next(iter(damaged.values()))
    raise CheckpointError(
        f"{directory} has no checkpoint; expected the directory that a step was saved in"
    )


def _set_aside(
    directory: Path, damaged: Mapping[int, DamagedCheckpointError], restored: int
) -> None:
    """Rename damaged checkpoints, so that the restored one is the last."""
    if not damaged:
        return
    try:
        directory_lock = lock(directory)
    except (CheckpointError, OSError) as error:
        causes = "; ".join(map(str, damaged.values()))
        raise CheckpointError(
            f"{causes}. It can't be set aside ({error}); step={restored} restores the last"
            " checkpoint that can be read"
        ) from error
    try:
        for step, error in damaged.items():
            path = set_aside(directory, step)
            warnings.warn(
                f"{error}. The checkpoint of step {step} is set aside as {path}, and step"
                f" {restored} is restored",
                stacklevel=4,
            )
    finally:
        directory_lock.release()


def _restored(directory: Path, step: int, placement_specs: Any, verify: bool) -> Any:
    """Restore the checkpoint of a step."""
    manifest = Manifest.load(directory, step)
    folder = (directory / str(step)).absolute()
    saved = {array.path: array for array in manifest.arrays}
    if placement_specs is None:
        values = restore(folder, [Wanted(array, None) for array in saved.values()], verify)
        state = dict(zip(saved, values, strict=True))
    else:
        paths, tree = jax.tree.flatten_with_path(placement_specs)
        wanted = {jax.tree_util.keystr(path): spec for path, spec in paths}
        _check(folder, saved, wanted)
        state = jax.tree.unflatten(tree, _placed(folder, saved, wanted, verify))
    if verify and manifest.format == 1:
        warnings.warn(
            f"{folder} was written before checkpoints had checksums: damage to its data would not"
            " be noticed. Save the state again to have them, or restore with verify=False",
            stacklevel=3,
        )
    return state


def _placed(
    folder: Path, saved: Mapping[str, SavedArray], wanted: Mapping[str, Any], verify: bool
) -> list[Any]:
    """Restore arrays at their places, those in pieces piece by piece."""
    pieces = [piece for path, spec in wanted.items() for piece in _pieces(saved[path], spec)]
    values = iter(_placed_pieces(folder, pieces, verify))
    return [
        JoinedArray(tuple(next(values) for _ in spec.pieces), spec.dim)
        if isinstance(spec, JoinedPlacement | JoinedArray)
        else next(values)
        for spec in wanted.values()
    ]


def _pieces(saved: SavedArray, spec: Any) -> list[tuple[SavedArray, Any]]:
    """Return the pieces of an array with their placements; one if it is in one piece."""
    if not isinstance(spec, JoinedPlacement | JoinedArray):
        return [(saved, spec)]
    sizes = [piece.aval.shape[spec.dim] for piece in spec.pieces]
    return [
        (saved.window(spec.dim, stop - size, stop), piece)
        for size, stop, piece in zip(sizes, accumulate(sizes), spec.pieces, strict=True)
    ]


def _placed_pieces(
    folder: Path, pieces: Sequence[tuple[SavedArray, Any]], verify: bool
) -> Sequence[Any]:
    """Restore arrays at their places, which are each on one mesh."""
    if all(isinstance(spec, PlacementSpec) for _, spec in pieces):
        by_hosts = backend().restore(folder, pieces, verify)
        if by_hosts is not None:
            return by_hosts
    values = restore(folder, [_with_sharding(saved, spec) for saved, spec in pieces], verify)
    return [_with_key(saved, value) for (saved, _), value in zip(pieces, values, strict=True)]


def _with_sharding(saved: SavedArray, spec: Any) -> Wanted:
    """Return an array with its sharding in this process; further dims of key data are unsharded."""
    sharding = spec.sharding() if isinstance(spec, PlacementSpec) else spec.sharding
    if saved.key is not None and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return Wanted(saved, sharding)


def _with_key(saved: SavedArray, value: jax.Array) -> jax.Array:
    return value if saved.key is None else jax.random.wrap_key_data(value, impl=saved.key)


def _check(folder: Path, saved: Mapping[str, SavedArray], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the saved state and the placements have the same arrays."""
    wrong = [f"{path} is missing" for path in wanted if path not in saved]
    wrong += [f"{path} is not in the state to restore" for path in saved if path not in wanted]
    for path, spec in wanted.items():
        if not isinstance(
            spec,
            PlacementSpec | JoinedPlacement | JoinedArray | jax.ShapeDtypeStruct | jax.Array,
        ):
            raise TypeError(
                f"placement_specs has {spec!r:.80} at {path or 'its only place'}, expected a"
                " PlacementSpec: executable.get_input_placement_specs()[0] is a pytree of them"
            )
        if path in saved:
            difference = _difference(saved[path], getattr(spec, "aval", spec))
            if difference:
                wrong.append(f"{path} is {difference}")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another state: {'; '.join(wrong[:_SHOWN])}{more}. Restore"
            " it with placements of the step that it was saved from, under any plan"
        )


def _difference(saved: SavedArray, wanted: Any) -> str:
    """Describe how a saved array differs from the wanted type; "" if it does not."""
    data = data_aval(wanted)
    key = impl_of(wanted.dtype) if is_key(wanted.dtype) else None
    dtype = jax.dtypes.canonicalize_dtype(data.dtype)
    if (saved.shape, saved.jax_dtype, saved.key) == (tuple(data.shape), dtype, key):
        return ""
    kind = f"random keys ({saved.key})" if saved.key else saved.dtype
    return (
        f"{kind}{list(saved.shape)} there, {wanted.dtype}{list(wanted.shape)} in the state to"
        " restore"
    )
