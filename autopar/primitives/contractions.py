"""Products summed over dims: matrix products and convolutions."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.primitives.equation_work import contraction_kernel
from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.local_forms import Shapes
from autopar.primitives.operand_layouts import conv_layouts, dot_layouts
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import shape_of
from simulator.work import Gemm


def _dot_general(eqn: JaxprEqn) -> OpFactors:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs_shape, rhs_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    build = FactorBuilder()
    lhs: dict[int, tuple[int, ...]] = {}
    rhs: dict[int, tuple[int, ...]] = {}
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs[left] = rhs[right] = build.new(lhs_shape[left])
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs[left] = rhs[right] = build.new(lhs_shape[left], "sum")
    lhs_free = [dim for dim in range(len(lhs_shape)) if dim not in lhs]
    rhs_free = [dim for dim in range(len(rhs_shape)) if dim not in rhs]
    lhs.update((dim, build.new(lhs_shape[dim])) for dim in lhs_free)
    rhs.update((dim, build.new(rhs_shape[dim])) for dim in rhs_free)
    result = [lhs[d] for d in lhs_batch] + [lhs[d] for d in lhs_free] + [rhs[d] for d in rhs_free]
    operands = [
        tuple(lhs[d] for d in range(len(lhs_shape))),
        tuple(rhs[d] for d in range(len(rhs_shape))),
    ]
    return build.build(operands, [tuple(result)], decides=True)


def _conv_general_dilated(eqn: JaxprEqn) -> OpFactors:
    """Shard the batch, the input channels (summed), the output channels, and their groups.

    Spatial dims are whole. A gradient with respect to the kernel is a convolution whose input
    channels are the examples.
    """
    params = eqn.params
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    numbers = params["dimension_numbers"]
    lhs_shape, rhs_shape, out_shape = (shape_of(atom) for atom in (*eqn.invars, *eqn.outvars))
    build = FactorBuilder()
    group = build.new(groups * batch_groups)  # one of the two is 1
    examples = build.new(lhs_shape[numbers.lhs_spec[0]] // batch_groups)
    channels = build.new(rhs_shape[numbers.rhs_spec[1]], "sum")
    features = build.new(rhs_shape[numbers.rhs_spec[0]] // (groups * batch_groups))
    in_groups, in_batch_groups = (group, ()) if groups > 1 else ((), group)

    def dims(
        shape: tuple[int, ...],
        spec: tuple[int, ...],
        first: tuple[int, ...],
        second: tuple[int, ...],
    ):
        found = {spec[0]: first, spec[1]: second}
        return tuple(
            found[dim] if dim in found else build.new(size, "whole")
            for dim, size in enumerate(shape)
        )

    lhs = dims(lhs_shape, numbers.lhs_spec, in_batch_groups + examples, in_groups + channels)
    rhs = dims(rhs_shape, numbers.rhs_spec, group + features, channels)
    out = dims(out_shape, numbers.out_spec, examples, group + features)
    return build.build([lhs, rhs], [out], decides=True)


def _tiled(eqn: JaxprEqn, operands: Shapes) -> Gemm | None:
    """Return the sizes of a product of shards that is computed in tiles; None for one by a vector.

    XLA computes products of vectors, or of matrices and vectors, as fused reductions.
    """
    gemm = _gemm(eqn, operands)
    return None if 1 in (gemm.m, gemm.n) else gemm


def _gemm(eqn: JaxprEqn, operands: Shapes) -> Gemm:
    """Return the sizes of a matrix product of shards.

    A product of complex numbers counts as four of real ones.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = operands

    def free(shape: tuple[int, ...], taken: Sequence[int]) -> int:
        return prod(size for dim, size in enumerate(shape) if dim not in taken)

    return Gemm(
        m=free(lhs, (*lhs_contract, *lhs_batch)),
        n=free(rhs, (*rhs_contract, *rhs_batch)),
        k=prod(lhs[dim] for dim in lhs_contract),
        batch=_real_products(eqn) * prod(lhs[dim] for dim in lhs_batch),
    )


def _gemm_flops(eqn: JaxprEqn, operands: Shapes) -> float:
    return _gemm(eqn, operands).flops


def _conv_flops(eqn: JaxprEqn, operands: Shapes) -> float:
    """Return two FLOP per element of the result, of the window and of the input channels.

    Zeros that `lhs_dilation` inserts are free.
    """
    lhs, rhs = operands
    params = eqn.params
    numbers, batch_groups = params["dimension_numbers"], params["batch_group_count"]
    out = aval_of(eqn.outvars[0]).shape
    # Sharding the examples of several batch groups shards the groups, not the examples of each.
    examples = lhs[numbers.lhs_spec[0]] if batch_groups == 1 else out[numbers.out_spec[0]]
    space = prod(out[dim] for dim in numbers.out_spec[2:])
    flops = 2.0 * examples * space * prod(rhs) / prod(params["lhs_dilation"])
    return _real_products(eqn) * flops


def _real_products(eqn: JaxprEqn) -> int:
    """Return the number of products of real numbers in each product of an equation."""
    return 4 if jnp.issubdtype(aval_of(eqn.invars[0]).dtype, jnp.complexfloating) else 1


def _local_conv(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    batch = shards[0].shape[numbers.lhs_spec[0]] // shapes[0][numbers.out_spec[0]]
    channels = shards[0].shape[numbers.lhs_spec[1]] // shards[1].shape[numbers.rhs_spec[1]]
    return bind(eqn, shards, batch_group_count=batch, feature_group_count=channels)


def _has_groups(eqn: JaxprEqn) -> bool:
    """Return whether a convolution has groups, which XLA's partitioner (jaxlib 0.11.2) gets wrong.

    The kernel gradient of a vmapped convolution has the examples as groups, and the kernel gradient
    of a grouped convolution has `batch_group_count`. Under some shardings the partitioned program
    computes wrong numbers, with plain `jax.jit` as well. tests/fuzz/test_splits.py compares every
    split of every family of primitives with one device; it names the primitives that a new jaxlib
    gets wrong.
    """
    return eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1


RECORDS = {
    "conv_general_dilated": PrimitiveRecord(
        factors=_conv_general_dilated,
        local=_local_conv,
        work=contraction_kernel("conv", _conv_flops),
        fusion="contraction",
        layouts=conv_layouts,
        algebra="product",
        runs_on_shards=_has_groups,
    ),
    "dot_general": PrimitiveRecord(
        factors=_dot_general,
        work=contraction_kernel("gemm", _gemm_flops, _tiled),
        fusion="contraction",
        layouts=dot_layouts,
        algebra="product",
    ),
}
