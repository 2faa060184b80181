"""Where the arguments of a step written by hand go."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.spec import misfit


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
        if reason := misfit(spec, x.shape, mesh.shape):
            raise ValueError(
                f"argument {jax.tree_util.keystr(path, simple=True, separator='/')}: {reason}"
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, args, specs)
