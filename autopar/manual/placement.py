"""Where the arguments of a step written by hand go."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def shardings(mesh: Mesh, specs: Any, args: Any) -> Any:
    """The sharding of each array of `args`, after a check that its dims can be split so.

    Args:
        specs: a pytree of PartitionSpecs, of the structure of `args`.
        args: a pytree of arrays or ShapeDtypeStructs.

    Raises:
        ValueError: a spec names an axis that the mesh doesn't have, or has more entries than the array has dims, or splits a dim
            that the devices along its axes don't divide. It says which array of `args` that is.
    """

    def sharding(path: Any, x: Any, spec: PartitionSpec) -> NamedSharding:
        _check(f"argument {jax.tree_util.keystr(path, simple=True, separator='/')}", x.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, args, specs)


def _check(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{name} has {len(shape)} dims {shape}, but {spec} is for {len(spec)}; leave some out")
    for dim, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        count = 1
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(f"{name}: {spec} names the axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}")
            count *= mesh.shape[axis]
        if shape[dim] % count:
            raise ValueError(
                f"{name} of shape {shape}: dim {dim} can't be split over the {count} devices along {', '.join(axes)}; "
                f"use a multiple of {count}"
            )
