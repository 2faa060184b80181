"""Ragged products: each group of rows is multiplied by a matrix of its own.

The rows are the tokens of a mixture of experts; the groups are the experts. Rows may be sharded,
with all matrices on every device, and groups may be sharded, with all rows on every device. The
gradient of the matrices is a product whose summed dim are the rows.

There are two primitives. JAX's `ragged_dot_general` has rows sorted by group and takes the sizes of
the groups: each device computes from them the groups of its rows. `grouped_dot_p` has rows in any
order and takes the group of each row (`autopar.tracing.sorted_rows` introduces it). Each device
sorts its own rows.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir

from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec
from autopar.primitives.equation_work import Shapes
from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import replicated, shape_of
from simulator.work import Gemm, Kernel


class RaggedDims(NamedTuple):
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


def dims_of(eqn: JaxprEqn) -> RaggedDims | None:
    """Return the dims of a ragged product; None if it has an offset of groups or ragged batches."""
    dims = _dims_of_numbers(eqn.params["ragged_dot_dimension_numbers"])
    has_sizes_only = len(eqn.invars) == 3
    is_ragged_batch = dims.rows in [left for left, _ in dims.batch]
    if not has_sizes_only or len(shape_of(eqn.invars[2])) != 1 + len(dims.batch) or is_ragged_batch:
        return None
    return dims


def _dims_of_numbers(numbers: lax.RaggedDotDimensionNumbers) -> RaggedDims:
    contract, batch = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    groups = tuple(numbers.rhs_group_dimensions)
    return RaggedDims(
        batch=tuple(zip(*batch, strict=True)),
        contracted=tuple(zip(*contract, strict=True)),
        rows=rows,
        groups=groups[0] if groups else None,
    )


def _num_groups(dims: RaggedDims, rhs: Sequence[int], result: Sequence[int]) -> int:
    return result[0] if dims.groups is None else rhs[dims.groups]


def _factors(eqn: JaxprEqn) -> OpFactors:
    """Share rows, groups and the dims of the matrices.

    Where groups are sharded, the rows of other groups are zero in a device's result, and the
    results are summed.
    """
    dims = dims_of(eqn)
    if dims is None:
        return replicated(eqn)
    build = FactorBuilder()
    lhs_shape, rhs_shape, last_shape = map(shape_of, eqn.invars)
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
    num_groups = _num_groups(dims, rhs_shape, shape_of(eqn.outvars[0]))
    group = build.new(num_groups, kinds[0 if dims.groups is None else 1])
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
    is_grouped = eqn.primitive is grouped_dot_p
    last = lhs[dims.rows] if is_grouped else build.new(last_shape[-1], "whole")
    return build.build([*operands, (*of_batch, last)], [tuple(of_result)], decides=True)


def _local(
    eqn: JaxprEqn,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    shapes: Shapes,
    shards: Sequence[Any],
) -> list[Any]:
    """Multiply this device's rows of its groups, which the sizes of all groups tell."""
    dims = dims_of(eqn)
    assert dims is not None
    lhs, rhs, sizes = shards
    if dims.batch:
        return bind(eqn, shards)
    num_rows = lhs.shape[dims.rows]
    position = _position(operands[0][dims.rows]) * num_rows + jnp.arange(num_rows)
    group = jnp.searchsorted(jnp.cumsum(sizes), position, side="right")
    own = _own_groups(dims, operands, results, shapes, rhs)
    return [_product(eqn.params, dims, lhs, rhs, group, own)]


def _local_grouped(
    eqn: JaxprEqn,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    shapes: Shapes,
    shards: Sequence[Any],
) -> list[Any]:
    """Multiply this device's rows of its groups, which stand beside the rows."""
    lhs, rhs, group = shards
    dims = dims_of(eqn)
    assert dims is not None
    own = _own_groups(dims, operands, results, shapes, rhs)
    return [_product(eqn.params, dims, lhs, rhs, group, own, is_sorted=False)]


class _OwnGroups(NamedTuple):
    """The groups of a device.

    Attributes:
        first: the number of the first.
        num_groups: how many there are.
        is_all: whether these are all groups.
    """

    first: Any
    num_groups: int
    is_all: bool


def _own_groups(
    dims: RaggedDims, operands: Sequence[Spec], results: Sequence[Spec], shapes: Shapes, rhs: Any
) -> _OwnGroups:
    axes = results[0][0] if dims.groups is None else operands[1][dims.groups]
    count = shapes[0][0] if dims.groups is None else rhs.shape[dims.groups]
    return _OwnGroups(_position(axes) * count, count, not axes)


def _product(
    params: Mapping[str, Any],
    dims: RaggedDims,
    lhs: Any,
    rhs: Any,
    group: Any,
    own: _OwnGroups,
    is_sorted: bool = True,
) -> Any:
    """Multiply rows by the matrices of a device's groups; rows of other groups become zero.

    Args:
        params: parameters of the equation.
        dims: its dims.
        lhs: the device's rows.
        rhs: its matrices; or rows, if the product sums over them.
        group: the group of each row.
        own: the device's groups.
        is_sorted: whether the rows are sorted by group.
    """
    place = group - own.first
    place = jnp.where((place >= 0) & (place < own.num_groups), place, own.num_groups)
    sizes = jnp.zeros(own.num_groups, jnp.int32).at[place].add(1, mode="drop")
    order = None
    if not (is_sorted and own.is_all):
        order = jnp.argsort(place)
        lhs = jnp.take(lhs, order, dims.rows, mode="clip")
        if dims.rows_of_rhs is not None:
            rhs = jnp.take(rhs, order, dims.rows_of_rhs, mode="clip")
    result = lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        params["ragged_dot_dimension_numbers"],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    if dims.groups is None:
        return result
    free = [dim for dim in range(lhs.ndim) if dim not in dict(dims.contracted)]
    row_dim = free.index(dims.rows)
    row = lax.broadcasted_iota(sizes.dtype, result.shape, row_dim)
    result = jnp.where(row < sizes.sum(), result, jnp.zeros_like(result))
    if order is None:
        return result
    return jnp.take(result, jnp.argsort(order), row_dim, mode="clip")


def _position(axes: tuple[str, ...]) -> Any:
    """Return the position of this device along mesh axes."""
    return lax.axis_index(axes) if axes else 0


def _kernel(eqn: JaxprEqn, operands: Shapes, results: Shapes, moved_bytes: float) -> Kernel:
    """Return the product that XLA:GPU computes (jaxlib 0.11.2).

    It copies the rows once for each group, with zeros for the rows of other groups, and multiplies
    all copies: the FLOP are those of every row with every matrix.
    """
    lhs, rhs = operands[:2]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contract, *batch, *numbers.rhs_group_dimensions}
    columns = prod(size for dim, size in enumerate(rhs) if dim not in taken)
    aval = aval_of(eqn.invars[0])
    dtype = hlo_dtype(aval.dtype)
    dims = dims_of(eqn)
    if dims is None or dims.batch:
        flops = 2.0 * prod(lhs) * columns
        return Kernel(eqn.primitive.name, "gemm", flops, moved_bytes, dtype)
    num_groups = _num_groups(dims, rhs, results[0])
    num_rows = lhs[dims.rows]
    width = prod(lhs) // max(1, num_rows)
    if dims.groups is None:
        gemm = Gemm(width, columns, num_rows, num_groups)
    else:
        gemm = Gemm(num_rows, columns, width * num_groups)
    copied = prod(lhs) + (prod(rhs) if dims.groups is None else 0)
    # Each copy is written and read; a sort of the rows reads and writes them.
    passes = 2 * num_groups + (2 if eqn.primitive is grouped_dot_p else 0)
    moved_bytes += passes * copied * aval.dtype.itemsize
    return Kernel(eqn.primitive.name, "gemm", gemm.flops, moved_bytes, dtype, gemm)


def products_per_row(eqn: JaxprEqn) -> int:
    """Return with how many matrices XLA:GPU multiplies a row: all those of a ragged product.

    It is one for other equations, and for each row only one of the products is used.
    """
    if eqn.primitive is not grouped_dot_p and eqn.primitive.name != "ragged_dot_general":
        return 1
    dims = dims_of(eqn)
    if dims is None or dims.batch:
        return 1
    return _num_groups(dims, shape_of(eqn.invars[1]), shape_of(eqn.outvars[0]))


def _whole_product(lhs: Any, rhs: Any, group: Any, **params: Any) -> Any:
    """Return a grouped product on one device."""
    dims = _dims_of_numbers(params["ragged_dot_dimension_numbers"])
    count = params["num_groups"]
    return _product(params, dims, lhs, rhs, group, _OwnGroups(0, count, True), is_sorted=False)


grouped_dot_p = Primitive("grouped_dot")
"""A ragged product of rows in any order. Its third operand is the group of each row.

Its parameters are those of `ragged_dot_general`, and the number of groups. A row is zero in the
result, and no part of a sum, if its group is none of them.
"""
grouped_dot_p.def_impl(_whole_product)
grouped_dot_p.def_abstract_eval(
    lambda *avals, **params: ShapedArray(
        (shape := jax.eval_shape(partial(_whole_product, **params), *avals)).shape, shape.dtype
    )
)
mlir.register_lowering(grouped_dot_p, mlir.lower_fun(_whole_product, multiple_results=False))

RECORDS = {
    "ragged_dot_general": PrimitiveRecord(
        factors=_factors,
        local=_local,
        work=_kernel,
        algebra="product",
        data=slice(2),
        runs_on_shards=lambda eqn: dims_of(eqn) is not None,
    ),
    "grouped_dot": PrimitiveRecord(
        factors=_factors,
        local=_local_grouped,
        work=_kernel,
        algebra="product",
        data=slice(2),
        runs_on_shards=True,
    ),
}
