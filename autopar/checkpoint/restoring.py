"""Restoring a state where a plan wants it, whatever plan it was saved under."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.checkpoint.manifest import CheckpointError, Manifest, SavedArray, latest_step
from autopar.checkpoint.parts import Wanted, restore
from autopar.checkpoint.saving import finish_saving
from autopar.hosts import session
from autopar.hosts.job import Place
from autopar.inspect import PlacementSpec
from autopar.keys import is_key

_SHOWN = 5
"""How many arrays an error names."""


def restore_checkpoint(ckpt_dir: str | os.PathLike[str], step: int | None = None, placement_specs: Any = None) -> Any:
    """The state that was saved in `ckpt_dir`, placed as `placement_specs` say: those of any plan, mesh and number of hosts.

    Each host reads only what its devices need.

    Args:
        step: of the state; by default the last one saved.
        placement_specs: a pytree like the state with a `PlacementSpec` for every array, `executable.get_input_placement_specs()[0]`,
            say. For arrays on devices of this process `jax.ShapeDtypeStruct`s with shardings will do. None: all arrays are brought
            here, as numpy arrays by their path in the state.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of a state with other arrays.
        ValueError: the placements are for devices that are not there.
    """
    finish_saving()
    directory = Path(ckpt_dir)
    last = latest_step(directory) if step is None else step
    if last is None:
        raise CheckpointError(f"{directory} has no checkpoint")
    manifest, folder = Manifest.load(directory, last), (directory / str(last)).absolute()
    saved = {array.path: array for array in manifest.arrays}
    if placement_specs is None:
        values = restore(folder, [Wanted(array, None) for array in saved.values()])
        return dict(zip(saved, values, strict=True))
    paths, tree = jax.tree.flatten_with_path(placement_specs)
    wanted = {jax.tree_util.keystr(path): spec for path, spec in paths}
    _check(folder, saved, wanted)
    hosts = session.hosts()
    if hosts is not None:
        places = {path: (saved[path], Place.of(spec)) for path, spec in wanted.items()}
        return jax.tree.unflatten(tree, hosts.restore(folder, list(places.values())))
    made = restore(folder, [_wanted_here(saved[path], spec) for path, spec in wanted.items()])
    return jax.tree.unflatten(tree, [_with_key(saved[path], made) for path, made in zip(wanted, made, strict=True)])


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
    if is_key(wanted.dtype):
        is_same = saved.key is not None and saved.shape[: len(wanted.shape)] == tuple(wanted.shape)
    else:
        is_same = saved.key is None and saved.shape == tuple(wanted.shape) and saved.jax_dtype == wanted.dtype
    kind = "random keys" if saved.key else saved.dtype
    return (
        ""
        if is_same
        else f"{kind}{list(saved.shape)} there, {wanted.dtype}{list(wanted.shape)} in the state to restore"
    )
