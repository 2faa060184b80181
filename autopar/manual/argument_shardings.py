"""Shardings of the arguments of a hand-written step."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.spec import spec_problem


def shardings(mesh: Mesh, specs: Any, args: Any) -> Any:
    """Return the sharding of each array of `args`, and check that it divides the array evenly.

    Args:
        mesh: The mesh.
        specs: A pytree of PartitionSpecs with the structure of `args`.
        args: A pytree of arrays or ShapeDtypeStructs.

    Raises:
        ValueError: A spec names an axis that is not in the mesh, has more entries than its array
            has dims, or does not divide a dim evenly. The message names the array.
    """

    def sharding(path: Any, x: Any, spec: PartitionSpec) -> NamedSharding:
        if reason := spec_problem(spec, x.shape, mesh.shape):
            raise ValueError(
                f"argument {jax.tree_util.keystr(path, simple=True, separator='/')}: {reason}"
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, args, specs)
