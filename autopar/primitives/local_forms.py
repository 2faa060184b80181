"""Primitives on shards: shapes and positions in their parameters become those of the shard."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec

type Shapes = Sequence[tuple[int, ...]]

type LocalRule = Callable[
    [JaxprEqn, Sequence[Spec], Sequence[Spec], Shapes, Sequence[Any]], list[Any]
]
"""Computes the shards of an equation's results on one device.

Takes the equation, the specs of its operands and of its results (before partial sums are
completed), the shapes of the results' shards, and the shards of the operands.
"""


def with_shape(parameter: str) -> LocalRule:
    """Return the rule of a primitive that has the shape of its result as a parameter."""
    return lambda eqn, _in, _out, shapes, shards: bind(eqn, shards, **{parameter: shapes[0]})


def own_indices(
    index_map: Sequence[int],
    dims: Sequence[int],
    eqn: JaxprEqn,
    spec: Spec,
    operand: Any,
    indices: Any,
) -> tuple[Any, Any]:
    """Return indices relative to this device's shard, and a mask of those inside it.

    Only columns of `index_map` that index one of `dims` are changed.
    """
    own = jnp.ones(indices.shape[:-1], bool)
    for column, dim in enumerate(index_map):
        if dim in dims and spec[dim]:
            index, size = indices[..., column], operand.shape[dim]
            if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
                index = jnp.clip(index, 0, aval_of(eqn.invars[0]).shape[dim] - 1)
            index = index - lax.axis_index(spec[dim]).astype(index.dtype) * size
            inside = (index >= 0) & (index < size)
            indices, own = indices.at[..., column].set(jnp.where(inside, index, 0)), own & inside
    return indices, own
