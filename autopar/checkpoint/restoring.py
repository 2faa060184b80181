"""Restoring a state where a plan wants it, whatever plan it was saved under."""

import os
import warnings
from collections.abc import Mapping
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
from autopar.ir.keys import data_aval, impl_of, is_key
from autopar.lowering.placement_specs import PlacementSpec
from autopar.runtime.local_backend import backend

_SHOWN = 5
"""How many arrays an error names."""


def restore_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    step: int | None = None,
    placement_specs: Any = None,
    *,
    verify: bool = True,
) -> Any:
    """The state that was saved in `ckpt_dir`, placed as `placement_specs` say: those of any plan, mesh and number of hosts.

    Each host reads only what its devices need.

    Args:
        step: of the state; by default the last one that can be read. Later ones are then renamed to `<step>.damaged`, with a
            warning.
        placement_specs: a pytree like the state with a `PlacementSpec` for every array, `executable.get_input_placement_specs()[0]`,
            say. For arrays on devices of this process `jax.ShapeDtypeStruct`s with shardings will do. None: all arrays are brought
            here, as numpy arrays by their path in the state, and random keys as their data (`jax.random.key_data`).
        verify: whether to compare what is read with the checksums that were saved.

    Raises:
        CheckpointError: there is no such checkpoint, it can't be read, or it is of a state with other arrays.
        ValueError: the placements are for devices that are not there, or `step` is not the number of a step.
        TypeError: `placement_specs` has something else in it.
    """
    if step is None:
        return restore_last(ckpt_dir, placement_specs, verify)[1]
    check_step(step)
    finish_saving()
    return _restored(directory_path(ckpt_dir), int(step), placement_specs, verify)


def restore_last(
    ckpt_dir: str | os.PathLike[str], placement_specs: Any = None, verify: bool = True
) -> tuple[int, Any]:
    """Restore the last checkpoint that can be read, and set later ones aside with a warning; return its step, too."""
    finish_saving()
    directory = directory_path(ckpt_dir)
    damaged: dict[int, DamagedCheckpointError] = {}
    for step in reversed(saved_steps(directory)):
        try:
            state = _restored(directory, step, placement_specs, verify)
        except DamagedCheckpointError as error:
            if (
                directory / str(step)
            ).exists():  # else a process that saves has removed it meanwhile
                damaged[step] = error
        else:
            _set_aside(directory, damaged, step)
            return step, state
    if damaged:
        raise CheckpointError(
            f"{directory} has no checkpoint that can be read: {'; '.join(map(str, damaged.values()))}"
        ) from next(iter(damaged.values()))
    raise CheckpointError(f"{directory} has no checkpoint")


def _set_aside(
    directory: Path, damaged: Mapping[int, DamagedCheckpointError], restored: int
) -> None:
    """Rename damaged checkpoints, so that the one that was restored is the last."""
    if not damaged:
        return
    try:
        held = lock(directory)
    except (CheckpointError, OSError) as error:
        said = "; ".join(map(str, damaged.values()))
        raise CheckpointError(
            f"{said}. It can't be set aside ({error}); step={restored} restores the last checkpoint that can be read"
        ) from error
    try:
        for step, error in damaged.items():
            path = set_aside(directory, step)
            warnings.warn(
                f"{error}. The checkpoint of step {step} is set aside as {path}, and that of step {restored} is restored",
                stacklevel=4,
            )
    finally:
        held.release()


def _restored(directory: Path, step: int, placement_specs: Any, verify: bool) -> Any:
    """Restore the checkpoint of a step."""
    manifest, folder = Manifest.load(directory, step), (directory / str(step)).absolute()
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
            f"{folder} was written before checkpoints had checksums: damage to its data would not be noticed. Save the state again to"
            " have them, or restore with verify=False",
            stacklevel=3,
        )
    return state


def _placed(
    folder: Path, saved: Mapping[str, SavedArray], wanted: Mapping[str, Any], verify: bool
) -> list[Any]:
    """Restore arrays where they are wanted."""
    if all(isinstance(spec, PlacementSpec) for spec in wanted.values()):
        by_hosts = backend().restore(
            folder, [(saved[path], spec) for path, spec in wanted.items()], verify
        )
        if by_hosts is not None:
            return by_hosts
    values = restore(
        folder, [_wanted_here(saved[path], spec) for path, spec in wanted.items()], verify
    )
    return [_with_key(saved[path], value) for path, value in zip(wanted, values, strict=True)]


def _wanted_here(saved: SavedArray, spec: Any) -> Wanted:
    """Where this process should have an array; the data of keys have dims more, which are whole."""
    sharding = spec.sharding() if isinstance(spec, PlacementSpec) else spec.sharding
    if saved.key is not None and isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, sharding.spec)
    return Wanted(saved, sharding)


def _with_key(saved: SavedArray, made: jax.Array) -> jax.Array:
    return made if saved.key is None else jax.random.wrap_key_data(made, impl=saved.key)


def _check(folder: Path, saved: Mapping[str, SavedArray], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the state that was saved has the arrays that are wanted."""
    wrong = [f"{path} is missing" for path in wanted if path not in saved]
    wrong += [f"{path} is not in the state to restore" for path in saved if path not in wanted]
    for path, spec in wanted.items():
        if not isinstance(spec, PlacementSpec | jax.ShapeDtypeStruct | jax.Array):
            raise TypeError(
                f"placement_specs has {spec!r:.80} at {path or 'its only place'}, expected a PlacementSpec:"
                " executable.get_input_placement_specs()[0] is a pytree of them"
            )
        if path in saved and (other := _difference(saved[path], getattr(spec, "aval", spec))):
            wrong.append(f"{path} is {other}")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"{folder} is a checkpoint of another state: {'; '.join(wrong[:_SHOWN])}{more}. Restore it with placements of the"
            " step that it was saved from, under any plan"
        )


def _difference(saved: SavedArray, wanted: Any) -> str:
    """How a saved array is not the one that is wanted; "" if it is."""
    data, key = data_aval(wanted), impl_of(wanted.dtype) if is_key(wanted.dtype) else None
    if (saved.shape, saved.jax_dtype, saved.key) == (tuple(data.shape), data.dtype, key):
        return ""
    kind = f"random keys ({saved.key})" if saved.key else saved.dtype
    return f"{kind}{list(saved.shape)} there, {wanted.dtype}{list(wanted.shape)} in the state to restore"
