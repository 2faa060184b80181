"""Ragged products: each group of consecutive rows is multiplied by a matrix of its own.

The rows are the tokens of a mixture of experts, sorted by expert; the groups are the experts. Rows
may be sharded, with all matrices on every device, and groups may be sharded, with all rows on every
device. The sizes of groups are values, known when the step runs: each device computes from them
which of its rows belong to which of its groups. The gradient of the matrices is a product whose
summed dim are the rows.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec
from autopar.primitives.equation_work import Shapes
from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import replicated, shape_of
from simulator.work import Kernel


class _Dims(NamedTuple):
    """The dims of a ragged product.

    Attributes:
        batch: the batch dims of both operands, in pairs. The sizes of groups have them first.
        contracted: the summed dims of both operands, in pairs.
        rows: the dim of `lhs` that the groups divide.
        groups: the dim of `rhs` with a matrix per group; None if the rows are summed, so that the
            first dim of the result has a product per group.
    """

    batch: tuple[tuple[int, int], ...]
    contracted: tuple[tuple[int, int], ...]
    rows: int
    groups: int | None

    @property
    def rows_of_rhs(self) -> int | None:
        """The dim of `rhs` that the groups divide, if the rows are summed."""
        return dict(self.contracted).get(self.rows)


def _dims(eqn: JaxprEqn) -> _Dims | None:
    """Return the dims of a ragged product; None if it has an offset of groups or ragged batches."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    has_sizes_only = len(eqn.invars) == 3
    if not has_sizes_only or len(shape_of(eqn.invars[2])) != 1 + len(batch[0]) or rows in batch[0]:
        return None
    groups = tuple(numbers.rhs_group_dimensions)
    return _Dims(
        batch=tuple(zip(*batch, strict=True)),
        contracted=tuple(zip(*contract, strict=True)),
        rows=rows,
        groups=groups[0] if groups else None,
    )


def _factors(eqn: JaxprEqn) -> OpFactors:
    """Share rows, groups and the dims of the matrices.

    Where groups are sharded, the rows of other groups are zero in a device's result, and the
    results are summed.
    """
    dims = _dims(eqn)
    if dims is None:
        return replicated(eqn)
    build = FactorBuilder()
    lhs_shape, rhs_shape, sizes_shape = map(shape_of, eqn.invars)
    # Batches have groups of different sizes, and so their rows and groups are whole.
    kinds: tuple[Kind, Kind] = ("whole", "whole") if dims.batch else ("parallel", "sum")
    lhs: dict[int, tuple[int, ...]] = {}
    rhs: dict[int, tuple[int, ...]] = {}
    for left, right in dims.batch:
        lhs[left] = rhs[right] = build.new(lhs_shape[left])
    for left, right in dims.contracted:
        kind = kinds[1] if left == dims.rows else "sum"
        lhs[left] = rhs[right] = build.new(lhs_shape[left], kind)
    of_batch = [lhs[left] for left, _ in dims.batch]
    group = build.new(sizes_shape[-1], kinds[0 if dims.groups is None else 1])
    if dims.groups is not None:
        rhs[dims.groups] = group
    of_result = [*([group] if dims.groups is None else []), *of_batch]
    for shape, factors in ((lhs_shape, lhs), (rhs_shape, rhs)):
        free = [dim for dim in range(len(shape)) if dim not in factors]
        is_rows = [factors is lhs and dim == dims.rows for dim in free]
        factors.update(
            (dim, build.new(shape[dim], kinds[0] if ragged else "parallel"))
            for dim, ragged in zip(free, is_rows, strict=True)
        )
        of_result += [factors[dim] for dim in free]
    operands = [
        tuple(factors[dim] for dim in range(len(shape)))
        for shape, factors in ((lhs_shape, lhs), (rhs_shape, rhs))
    ]
    sizes = (*of_batch, build.new(sizes_shape[-1], "whole"))
    return build.build([*operands, sizes], [tuple(of_result)], decides=True)


def _local(
    eqn: JaxprEqn,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    shapes: Shapes,
    shards: Sequence[Any],
) -> list[Any]:
    """Multiply this device's rows of its groups."""
    dims = _dims(eqn)
    assert dims is not None
    lhs, rhs, sizes = shards
    if dims.batch:
        return bind(eqn, shards)
    num_rows = lhs.shape[dims.rows]
    group_axes = results[0][0] if dims.groups is None else operands[1][dims.groups]
    num_groups = shapes[0][0] if dims.groups is None else rhs.shape[dims.groups]
    ends = jnp.cumsum(sizes)
    first_row = _position(operands[0][dims.rows]) * num_rows
    starts, ends = (jnp.clip(at - first_row, 0, num_rows) for at in (ends - sizes, ends))
    if not group_axes:
        return bind(eqn, [lhs, rhs, ends - starts])
    first_group = _position(group_axes) * num_groups
    own_sizes = lax.dynamic_slice(ends - starts, (first_group,), (num_groups,))
    # The groups of a product begin at its first row.
    skipped = starts[first_group]
    lhs = jnp.roll(lhs, -skipped, dims.rows)
    if dims.rows_of_rhs is not None:
        rhs = jnp.roll(rhs, -skipped, dims.rows_of_rhs)
    (result,) = bind(eqn, [lhs, rhs, own_sizes])
    if dims.groups is None:
        return [result]
    free = [dim for dim in range(lhs.ndim) if dim not in dict(dims.contracted)]
    row_dim = free.index(dims.rows)
    row = lax.broadcasted_iota(own_sizes.dtype, result.shape, row_dim)
    own = jnp.where(row < own_sizes.sum(), result, jnp.zeros_like(result))
    return [jnp.roll(own, skipped, row_dim)]


def _position(axes: tuple[str, ...]) -> Any:
    """Return the position of this device along mesh axes."""
    return lax.axis_index(axes) if axes else 0


def _kernel(eqn: JaxprEqn, operands: Shapes, results: Shapes, moved_bytes: float) -> Kernel:
    """Return the product of each row with the matrix of its group.

    Devices have an equal share of the rows of groups that are sharded.
    """
    lhs, rhs = operands[:2]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contract, *batch, *numbers.rhs_group_dimensions}
    columns = prod(size for dim, size in enumerate(rhs) if dim not in taken)
    dims = _dims(eqn)
    share = 1.0
    if dims is not None:
        num_groups = results[0][0] if dims.groups is None else rhs[dims.groups]
        share = num_groups / shape_of(eqn.invars[2])[-1]
    flops = 2.0 * prod(lhs) * columns * share
    dtype = hlo_dtype(aval_of(eqn.invars[0]).dtype)
    return Kernel(eqn.primitive.name, "gemm", flops, moved_bytes, dtype)


RECORDS = {
    "ragged_dot_general": PrimitiveRecord(
        factors=_factors,
        local=_local,
        work=_kernel,
        algebra="product",
        runs_on_shards=lambda eqn: _dims(eqn) is not None,
    ),
}
