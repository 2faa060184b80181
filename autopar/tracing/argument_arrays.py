"""The names and types of the arrays among the arguments of a step."""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from autopar.ir.array_handle import ArrayHandle


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and weak type of an array, number or ShapeDtypeStruct."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | ArrayHandle) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of an array with a key path, such as "0/params/w"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_inputs(
    args: Sequence[Any], batch_argnums: Collection[int]
) -> list[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """Return the name and type of each array of `args`, and whether its first dim is the batch."""
    leaves, _ = jax.tree.flatten_with_path(tuple(args))
    avals = [(path, abstract(leaf)) for path, leaf in leaves]
    return [
        (path_name(path), aval, path[0].idx in batch_argnums and bool(aval.shape))
        for path, aval in avals
    ]
