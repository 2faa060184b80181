"""The mesh axes along which JAX's types say that values vary inside `jax.shard_map`."""

from collections.abc import Collection
from typing import Any

import jax


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes along which a value may vary.

    The attribute has no public name; seen in JAX 0.11.2.
    """
    return jax.typeof(value).manual_axis_type.varying


def vary(axes: Collection[str], value: Any) -> Any:
    """Return `value` typed as varying along `axes`, too."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(value))
    return jax.lax.pcast(value, missing, to="varying") if missing else value
