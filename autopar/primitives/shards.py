"""A primitive on shards: those whose parameters speak of shapes or positions get the shard's.

The property tests of the rule table (tests/autopar/sharding/shard_by_shard.py) run every sharding of every primitive through `bind_shards`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh, Spec, local_shape

type Shapes = Sequence[tuple[int, ...]]


def bind_shards(
    eqn: JaxprEqn,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    shards: Sequence[Any],
    mesh: LogicalMesh,
) -> list[Any]:
    """The primitive of `eqn` on the shards of its operands: shards of its results, partial sums where a summed dim is split."""
    shapes = [
        local_shape(aval_of(v).shape, spec, mesh)
        for v, spec in zip(eqn.outvars, results, strict=True)
    ]
    local = _LOCAL.get(eqn.primitive.name)
    made = local(eqn, operands, results, shapes, shards) if local else bind(eqn, shards)
    assert [r.shape for r in made] == shapes, (
        f"{eqn.primitive.name}: shards {shapes} claimed, {made} found"
    )
    return made


def bind(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    """The results of the primitive of `eqn`, with other parameters where given."""
    # Not under the equation's own context, which says that there is no mesh.
    result = eqn.primitive.bind(
        *operands, **eqn.primitive.get_bind_params({**eqn.params, **params})
    )
    return list(result) if eqn.primitive.multiple_results else [result]


# -- primitives that have shapes or positions in their parameters. Each takes the equation, the specs of operands and results
# (before completion), the shapes of the results' shards, and the shards of the operands.


def _with_shape(parameter: str) -> Callable[..., list[Any]]:
    return lambda eqn, _in, _out, shapes, shards: bind(eqn, shards, **{parameter: shapes[0]})


def _iota(eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any) -> list[Any]:
    (made,) = bind(eqn, shards, shape=shapes[0])
    dim = eqn.params["dimension"]
    return [
        made + (lax.axis_index(specs[0][dim]) * shapes[0][dim]).astype(made.dtype)
        if specs[0][dim]
        else made
    ]


def _slice(
    eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any
) -> list[Any]:
    limits = [
        size if axes else limit
        for limit, size, axes in zip(eqn.params["limit_indices"], shapes[0], specs[0], strict=True)
    ]
    return bind(eqn, shards, limit_indices=tuple(limits))


def _tile(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    reps = [result // size for result, size in zip(shapes[0], shards[0].shape, strict=True)]
    return bind(eqn, shards, reps=tuple(reps))


def _conv(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    batch = shards[0].shape[numbers.lhs_spec[0]] // shapes[0][numbers.out_spec[0]]
    channels = shards[0].shape[numbers.lhs_spec[1]] // shards[1].shape[numbers.rhs_spec[1]]
    return bind(eqn, shards, batch_group_count=batch, feature_group_count=channels)


def _gather(
    eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any
) -> list[Any]:
    """Look up the indices that this device has; zeros elsewhere."""
    numbers, full_shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    operand, indices = shards
    sizes = [
        local if axes and size == full else size
        for size, full, local, axes in zip(
            eqn.params["slice_sizes"], full_shape, operand.shape, specs[0], strict=True
        )
    ]
    sizes = [1 if dim in numbers.operand_batching_dims else size for dim, size in enumerate(sizes)]
    dims = [d for d in numbers.start_index_map if d in numbers.collapsed_slice_dims]
    indices, own = _own(numbers.start_index_map, dims, eqn, specs[0], operand, indices)
    (result,) = bind(eqn, (operand, indices), slice_sizes=tuple(sizes))
    batch = [dim for dim in range(result.ndim) if dim not in numbers.offset_dims]
    return [
        jnp.where(lax.broadcast_in_dim(own, result.shape, batch), result, jnp.zeros_like(result))
    ]


def _scatter(
    eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any
) -> list[Any]:
    """Write what belongs to this device; drop the rest."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shards
    dims = [d for d in numbers.scatter_dims_to_operand_dims if d in numbers.inserted_window_dims]
    indices, own = _own(numbers.scatter_dims_to_operand_dims, dims, eqn, specs[0], operand, indices)
    indices = jnp.where(own[..., None], indices, max(operand.shape, default=0))
    return bind(eqn, (operand, indices, updates), mode=lax.GatherScatterMode.FILL_OR_DROP)


def _own(
    index_map: Sequence[int],
    dims: Sequence[int],
    eqn: JaxprEqn,
    spec: Spec,
    operand: Any,
    indices: Any,
) -> tuple[Any, Any]:
    """Indices into this device's shard of the operand along `dims`, and which of them fall into it."""
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


_LOCAL: dict[str, Callable[..., list[Any]]] = {
    "broadcast_in_dim": _with_shape("shape"),
    "conv_general_dilated": _conv,
    "dynamic_slice": _with_shape("slice_sizes"),
    "gather": _gather,
    "iota": _iota,
    "reshape": _with_shape("new_sizes"),
    "slice": _slice,
    "tile": _tile,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
        _scatter,
    ),
}
