"""Gathers and scatters, which read or write at indices known only at run time.

A dim that is indexed one element at a time may be sharded: each device reads or writes the elements
of its own shard.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec
from autopar.primitives.factors import Dims, FactorBuilder, Kind, OpFactors
from autopar.primitives.local_forms import Shapes, own_indices
from autopar.primitives.registry import Algebra, PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, shape_of


def is_scatter(eqn: JaxprEqn) -> bool:
    """Return whether an equation writes updates to indexed places of an array."""
    return isinstance(eqn.params.get("dimension_numbers"), lax.ScatterDimensionNumbers)


def indexed_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the dims of the first operand that a gather or scatter indexes; () for others."""
    numbers = eqn.params.get("dimension_numbers")
    if isinstance(numbers, lax.GatherDimensionNumbers):
        return tuple(numbers.start_index_map)
    if isinstance(numbers, lax.ScatterDimensionNumbers):
        return tuple(numbers.scatter_dims_to_operand_dims)
    return ()


def _gather(eqn: JaxprEqn) -> OpFactors:
    """Sum over indexed dims: devices whose shard lacks an element contribute zero."""
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape, out_shape = map(shape_of, (*eqn.invars, *eqn.outvars))
    build = FactorBuilder()
    indices = build.dims(indices_shape[:-1])
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    kinds: dict[int, Kind] = {
        dim: "sum" if dim in numbers.start_index_map else "whole"
        for dim in numbers.collapsed_slice_dims
    }
    operand, result = _windows(
        build, operand_shape, out_shape, indices, dict(batching), kinds, numbers.offset_dims
    )
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
        numbers = eqn.params["dimension_numbers"]
        operand_shape, indices_shape, updates_shape = map(shape_of, eqn.invars)
        build = FactorBuilder()
        batched = numbers.scatter_indices_batching_dims
        indices = tuple(
            build.new(size, "parallel" if dim in batched else combine)
            for dim, size in enumerate(indices_shape[:-1])
        )
        batching = zip(numbers.operand_batching_dims, batched, strict=True)
        indexed = numbers.scatter_dims_to_operand_dims if prod(indices_shape[:-1]) != 1 else ()
        kinds: dict[int, Kind] = {
            dim: "parallel" if dim in indexed else "whole" for dim in numbers.inserted_window_dims
        }
        window_dims = numbers.update_window_dims
        operand, updates = _windows(
            build, operand_shape, updates_shape, indices, dict(batching), kinds, window_dims
        )
        operands = [operand, (*indices, ()), updates]
        return build.build(operands, [operand], decides=True, once=(0,) if combine == "sum" else ())

    return rule


def _windows(
    build: FactorBuilder,
    operand_shape: Sequence[int],
    windows_shape: Sequence[int],
    indices: Dims,
    batching: Mapping[int, int],
    kinds: Mapping[int, Kind],
    window_dims: Collection[int],
) -> tuple[Dims, Dims]:
    """Return the factors of an indexed array, and of the windows that are read from or added to it.

    A dim that windows cover whole is sharded like theirs. Dims that they cover in part are whole.

    Args:
        build: collects the factors.
        operand_shape: the shape of the indexed array.
        windows_shape: the shape of all windows: the result of a gather, or a scatter's updates.
        indices: the factors of the dims of the indices, without that of the coordinates.
        batching: the dim of the indices that each batch dim of the indexed array goes with.
        kinds: the kind of each dim of the indexed array that windows do not have.
        window_dims: the dims of `windows_shape` that windows have; the others are of the indices.
    """
    of_indices = iter(indices)
    windows = [() if dim in window_dims else next(of_indices) for dim in range(len(windows_shape))]
    inner_dims = iter(sorted(window_dims))
    operand: list[tuple[int, ...]] = []
    for dim, size in enumerate(operand_shape):
        if dim in batching:
            operand.append(indices[batching[dim]])
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
    indices, own = own_indices(numbers.start_index_map, dims, eqn, specs[0], operand, indices)
    (result,) = bind(eqn, (operand, indices), slice_sizes=tuple(sizes))
    batch = [dim for dim in range(result.ndim) if dim not in numbers.offset_dims]
    return [
        jnp.where(lax.broadcast_in_dim(own, result.shape, batch), result, jnp.zeros_like(result))
    ]


def _local_scatter(
    eqn: JaxprEqn, specs: Sequence[Spec], _out: Any, shapes: Shapes, shards: Any
) -> list[Any]:
    """Write the updates of this device's shard; drop the others."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shards
    dims = [d for d in numbers.scatter_dims_to_operand_dims if d in numbers.inserted_window_dims]
    indices, own = own_indices(
        numbers.scatter_dims_to_operand_dims, dims, eqn, specs[0], operand, indices
    )
    indices = jnp.where(own[..., None], indices, max(operand.shape, default=0))
    return bind(eqn, (operand, indices, updates), mode=lax.GatherScatterMode.FILL_OR_DROP)


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
