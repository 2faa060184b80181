"""Shardings of the arguments of a hand-written step."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.spec import spec_problem


def shardings(mesh: Mesh, specs: Any, args: Any) -> Any:
    """Return the sharding of each array of `args`, and check that it divides the array evenly.

    Args:
        mesh: the mesh.
        specs: a pytree of PartitionSpecs whose structure is that of `args` or a prefix of it, as
            the `in_specs` of `jax.shard_map` are. A spec in place of a subtree of `args` applies to
            every array in it.
        args: a pytree of arrays, numbers or ShapeDtypeStructs.

    Returns:
        A pytree of NamedShardings with the structure of `args`.

    Raises:
        ValueError: `specs` is no prefix of the structure of `args`. Or a spec names an axis
            that is not in the mesh, has more entries than its array has dims, or does not divide a
            dim evenly; the message names the array.
        TypeError: `specs` has a leaf that is not a PartitionSpec.
    """

    def sharding(path: Any, x: Any, spec: PartitionSpec) -> NamedSharding:
        if reason := spec_problem(spec, jax.numpy.shape(x), mesh.shape):
            raise ValueError(
                f"argument {jax.tree_util.keystr(path, simple=True, separator='/')}: {reason}"
            )
        return NamedSharding(mesh, spec)

    for spec in jax.tree.leaves(specs):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"specs has {spec!r} in it, expected PartitionSpecs; P() is unsharded")
    try:
        full_specs = jax.tree.broadcast(specs, args)
    except ValueError as error:
        raise ValueError(
            f"specs is {jax.tree.structure(specs)}, expected the structure of the arguments,"
            f" {jax.tree.structure(args)}, or a prefix of it"
        ) from error
    return jax.tree_util.tree_map_with_path(sharding, args, full_specs)
