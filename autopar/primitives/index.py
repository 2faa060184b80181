"""Gathers and scatters, which read or write at indices known only at run time.

A dim that is indexed one element at a time may be sharded: each device reads or writes the elements
of its own shard.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec
from autopar.primitives.factors import Dims, FactorBuilder, Kind, OpFactors
from autopar.primitives.index_dims import IndexDims
from autopar.primitives.local_forms import Shapes
from autopar.primitives.registry import Algebra, PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, shape_of


def is_scatter(eqn: JaxprEqn) -> bool:
    """Return whether an equation writes updates to indexed places of an array."""
    return isinstance(eqn.params.get("dimension_numbers"), lax.ScatterDimensionNumbers)


def indexed_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the dims of the first operand that a gather or scatter indexes; () for others."""
    is_gather = isinstance(eqn.params.get("dimension_numbers"), lax.GatherDimensionNumbers)
    return IndexDims.of(eqn).indexed if is_gather or is_scatter(eqn) else ()


def _gather(eqn: JaxprEqn) -> OpFactors:
    """Sum over indexed dims: devices whose shard lacks an element contribute zero."""
    dims = IndexDims.of(eqn)
    operand_shape, indices_shape, out_shape = map(shape_of, (*eqn.invars, *eqn.outvars))
    build = FactorBuilder()
    indices = build.dims(indices_shape[:-1])
    kinds: dict[int, Kind] = {
        dim: "sum" if dim in dims.indexed else "whole" for dim in dims.dropped
    }
    operand, result = _windows(build, operand_shape, out_shape, indices, dims, kinds)
    return build.build([operand, (*indices, ())], [result], decides=True)


def _scatter(combine: Kind) -> ShardingRule:
    """Return the rule of a scatter.

    A dim of the operand may be sharded if an update covers one element of it or all of them. Dims
    of the updates are of kind `combine`; for "sum" only the first device adds the operand.

    A single update has its indexed dims whole. XLA writes it as a dynamic_update_slice, and loses
    the check that the index is in the device's shard when it merges that with slices of what is
    added to the result (jaxlib 0.11.2).
    """

    def rule(eqn: JaxprEqn) -> OpFactors:
        dims = IndexDims.of(eqn)
        operand_shape, indices_shape, updates_shape = map(shape_of, eqn.invars)
        build = FactorBuilder()
        indices = tuple(
            build.new(size, "parallel" if dim in dims.batched.values() else combine)
            for dim, size in enumerate(indices_shape[:-1])
        )
        indexed = dims.indexed if prod(indices_shape[:-1]) != 1 else ()
        kinds: dict[int, Kind] = {
            dim: "parallel" if dim in indexed else "whole" for dim in dims.dropped
        }
        operand, updates = _windows(build, operand_shape, updates_shape, indices, dims, kinds)
        operands = [operand, (*indices, ()), updates]
        return build.build(operands, [operand], decides=True, once=(0,) if combine == "sum" else ())

    return rule


def _windows(
    build: FactorBuilder,
    operand_shape: Sequence[int],
    windows_shape: Sequence[int],
    indices: Dims,
    dims: IndexDims,
    kinds: Mapping[int, Kind],
) -> tuple[Dims, Dims]:
    """Return the factors of an indexed array, and of the windows that are read from or added to it.

    A dim that windows cover whole is sharded like theirs. Dims that they cover in part are whole.

    Args:
        build: collects the factors.
        operand_shape: the shape of the indexed array.
        windows_shape: the shape of all windows: the result of a gather, or a scatter's updates.
        indices: the factors of the dims of the indices, without the dim of coordinates.
        dims: the dims of the equation.
        kinds: the kind of each dim of the indexed array that windows do not have.
    """
    of_indices = iter(indices)
    windows = [() if dim in dims.windows else next(of_indices) for dim in range(len(windows_shape))]
    inner_dims = iter(sorted(dims.windows))
    operand: list[tuple[int, ...]] = []
    for dim, size in enumerate(operand_shape):
        if dim in dims.batched:
            operand.append(indices[dims.batched[dim]])
        elif dim in kinds:
            operand.append(build.new(size, kinds[dim]))
        else:
            inner = next(inner_dims)
            is_full = windows_shape[inner] == size
            operand.append(build.new(size, "parallel" if is_full else "whole"))
            windows[inner] = operand[-1] if is_full else build.new(windows_shape[inner], "whole")
    return tuple(operand), tuple(windows)


def _local_gather(
    eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any
) -> list[Any]:
    """Read the elements of this device's shard; return zeros for the others."""
    dims, full_shape = IndexDims.of(eqn), aval_of(eqn.invars[0]).shape
    operand, indices = shards
    sizes = [
        local if axes and size == full else size
        for size, full, local, axes in zip(
            eqn.params["slice_sizes"], full_shape, operand.shape, specs[0], strict=True
        )
    ]
    sizes = [1 if dim in dims.batched else size for dim, size in enumerate(sizes)]
    indices, own = _own_indices(eqn, specs[0], operand, indices)
    (result,) = bind(eqn, (operand, indices), slice_sizes=tuple(sizes))
    batch = [dim for dim in range(result.ndim) if dim not in dims.windows]
    return [
        jnp.where(lax.broadcast_in_dim(own, result.shape, batch), result, jnp.zeros_like(result))
    ]


def _local_scatter(
    eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any
) -> list[Any]:
    """Write the updates of this device's shard; drop the others."""
    operand, indices, updates = shards
    indices, own = _own_indices(eqn, specs[0], operand, indices)
    indices = jnp.where(own[..., None], indices, max(operand.shape, default=0))
    return bind(eqn, (operand, indices, updates), mode=lax.GatherScatterMode.FILL_OR_DROP)


def _own_indices(eqn: JaxprEqn, spec: Spec, operand: Any, indices: Any) -> tuple[Any, Any]:
    """Return indices relative to this device's shard, and a mask of those inside it.

    Only numbers that index a sharded dim, one element at a time, are changed.
    """
    dims = IndexDims.of(eqn)
    own = jnp.ones(indices.shape[:-1], bool)
    for column, dim in enumerate(dims.indexed):
        if dim in dims.dropped and spec[dim]:
            index, size = indices[..., column], operand.shape[dim]
            if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
                index = jnp.clip(index, 0, aval_of(eqn.invars[0]).shape[dim] - 1)
            index = index - lax.axis_index(spec[dim]).astype(index.dtype) * size
            inside = (index >= 0) & (index < size)
            indices, own = indices.at[..., column].set(jnp.where(inside, index, 0)), own & inside
    return indices, own


def _scatter_record(combine: Kind, algebra: Algebra | None = None) -> PrimitiveRecord:
    return PrimitiveRecord(
        factors=_scatter(combine),
        local=_local_scatter,
        fusion="update",
        algebra=algebra,
        data=slice(0, 3, 2),
    )


RECORDS = {
    "gather": PrimitiveRecord(
        factors=_gather,
        local=_local_gather,
        fusion="input",
        movement="part",
        algebra="linear",
        data=slice(1),
    ),
    "scatter": _scatter_record("whole", "selection"),
    "scatter-add": _scatter_record("sum", "sum"),
    "scatter-max": _scatter_record("max"),
    "scatter-min": _scatter_record("min"),
    "scatter-mul": _scatter_record("whole"),
    "scatter-sub": _scatter_record("sum", "sum"),
}
