"""Primitives that rearrange elements: broadcasts, reshapes, transposes, slices, padding, joins."""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import prod
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from autopar.ir.evaluate import bind
from autopar.ir.spec import Spec
from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.local_forms import Shapes, with_shape
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import along, leading, leading_of_both, shape_of, whole_along


def _broadcast_in_dim(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    result = build.dims(eqn.params["shape"])
    source = tuple(
        result[target] if size == eqn.params["shape"][target] else ()
        for size, target in zip(
            shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"], strict=True
        )
    )
    return build.build([source], [result])


def _iota(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    return build.build([], [build.dims(shape_of(eqn.outvars[0]))])


def _transpose(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    operand = build.dims(shape_of(eqn.invars[0]))
    return build.build([operand], [tuple(operand[dim] for dim in eqn.params["permutation"])])


def _squeeze(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    operand = build.dims(shape_of(eqn.invars[0]))
    dropped = eqn.params["dimensions"]
    return build.build(
        [operand], [tuple(dims for dim, dims in enumerate(operand) if dim not in dropped)]
    )


def _tile(eqn: JaxprEqn) -> OpFactors:
    """Give each dim its copies as major factor."""
    build = FactorBuilder()
    copies = [build.new(count) for count in eqn.params["reps"]]
    operand = build.dims(shape_of(eqn.invars[0]))
    return build.build(
        [operand], [tuple(major + minor for major, minor in zip(copies, operand, strict=True))]
    )


def _stack(eqn: JaxprEqn) -> OpFactors:
    build, axis = FactorBuilder(), eqn.params["axis"]
    operand = build.dims(shape_of(eqn.invars[0]))
    stacked = (*operand[:axis], build.new(len(eqn.invars), "whole"), *operand[axis:])
    return build.build([operand] * len(eqn.invars), [stacked])


def _unstack(eqn: JaxprEqn) -> OpFactors:
    build, axis = FactorBuilder(), eqn.params["axis"]
    result = build.dims(shape_of(eqn.outvars[0]))
    stacked = (*result[:axis], build.new(len(eqn.outvars), "whole"), *result[axis:])
    return build.build([stacked], [result] * len(eqn.outvars))


def _resized(eqn: JaxprEqn) -> OpFactors:
    """Share the dims that slices and their updates take in full; keep the others whole."""
    out = shape_of(eqn.outvars[0])
    shapes = [shape for shape in map(shape_of, eqn.invars) if len(shape) == len(out)]
    return whole_along(
        eqn, {dim for shape in shapes for dim, size in enumerate(shape) if size != out[dim]}
    )


def _pad(eqn: JaxprEqn) -> OpFactors:
    return whole_along(
        eqn, [dim for dim, amounts in enumerate(eqn.params["padding_config"]) if any(amounts)]
    )


def _reshape(eqn: JaxprEqn) -> OpFactors:
    """Match dims from the left; dims that merge or split have one factor per piece, major first."""
    build = FactorBuilder()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if 0 in source:  # sizes do not tell how the dims of an empty array merge
        equal = takewhile(lambda sizes: sizes[0] == sizes[1], zip(source, target, strict=False))
        return leading(eqn, len(list(equal)))
    operand: list[tuple[int, ...]] = []
    result: list[tuple[int, ...]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        start_i, start_j = i, j
        left = right = 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target):
            right, j = target[j], j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        pieces_i, pieces_j = source[start_i:i], target[start_j:j]
        split = _refine(pieces_i, pieces_j)
        if split is None:
            operand += [build.new(size, "whole") for size in pieces_i]
            result += [build.new(size, "whole") for size in pieces_j]
        else:
            factors = [build.new(size) for size in split]
            operand += _regroup(pieces_i, split, factors)
            result += _regroup(pieces_j, split, factors)
    return build.build([tuple(operand)], [tuple(result)])


def _refine(left: tuple[int, ...], right: tuple[int, ...]) -> list[int] | None:
    """Return the coarsest sizes of which `left` and `right` are both groupings, or None."""

    def cuts(sizes: tuple[int, ...]) -> set[int]:
        return {prod(sizes[:i]) for i in range(1, len(sizes) + 1)}

    if 0 in left or 0 in right:
        return None
    marks = sorted(cuts(left) | cuts(right) | {1})
    if any(b % a for a, b in pairwise(marks)):
        return None
    return [b // a for a, b in pairwise(marks)]


def _regroup(
    sizes: tuple[int, ...], split: list[int], factors: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    dims, at = [], 0
    for size in sizes:
        dim: tuple[int, ...] = ()
        covered = 1
        while covered < size:
            covered *= split[at]
            dim += factors[at]
            at += 1
        dims.append(dim)
    return dims


def _local_iota(
    eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any
) -> list[Any]:
    (made,) = bind(eqn, shards, shape=shapes[0])
    dim = eqn.params["dimension"]
    return [
        made + (lax.axis_index(specs[0][dim]) * shapes[0][dim]).astype(made.dtype)
        if specs[0][dim]
        else made
    ]


def _local_slice(
    eqn: JaxprEqn, _in: Any, specs: Sequence[Spec], shapes: Shapes, shards: Any
) -> list[Any]:
    limits = [
        size if axes else limit
        for limit, size, axes in zip(eqn.params["limit_indices"], shapes[0], specs[0], strict=True)
    ]
    return bind(eqn, shards, limit_indices=tuple(limits))


def _local_tile(eqn: JaxprEqn, _in: Any, _out: Any, shapes: Shapes, shards: Any) -> list[Any]:
    reps = [result // size for result, size in zip(shapes[0], shards[0].shape, strict=True)]
    return bind(eqn, shards, reps=tuple(reps))


RECORDS = {
    # The last dim of the narrower type holds the pieces of one element.
    "bitcast_convert_type": PrimitiveRecord(factors=leading_of_both),
    "broadcast_in_dim": PrimitiveRecord(
        factors=_broadcast_in_dim,
        local=with_shape("shape"),
        local_by_shape=True,
        fusion="indexing",
        movement="shape",
        algebra="linear",
    ),
    "concatenate": PrimitiveRecord(factors=along("dimension"), fusion="input", algebra="sum"),
    "dynamic_slice": PrimitiveRecord(
        factors=_resized,
        local=with_shape("slice_sizes"),
        local_by_shape=True,
        fusion="input",
        movement="part",
        algebra="linear",
        data=slice(1),
    ),
    "dynamic_update_slice": PrimitiveRecord(
        factors=_resized, fusion="update", algebra="sum", data=slice(2)
    ),
    "iota": PrimitiveRecord(factors=_iota, local=_local_iota, fusion="indexing"),
    "pad": PrimitiveRecord(factors=_pad, fusion="input", algebra="sum"),
    "reshape": PrimitiveRecord(
        factors=_reshape,
        local=with_shape("new_sizes"),
        local_by_shape=True,
        fusion="indexing",
        movement="shape",
        is_view=True,
        algebra="linear",
    ),
    "rev": PrimitiveRecord(factors=along("dimensions"), is_view=True, algebra="linear"),
    "slice": PrimitiveRecord(
        factors=_resized,
        local=_local_slice,
        local_by_shape=True,
        fusion="indexing",
        movement="part",
        algebra="linear",
    ),
    "split": PrimitiveRecord(factors=along("axis"), movement="part", algebra="linear"),
    "squeeze": PrimitiveRecord(
        factors=_squeeze, fusion="indexing", movement="shape", is_view=True, algebra="linear"
    ),
    "stack": PrimitiveRecord(factors=_stack, algebra="sum"),
    "tile": PrimitiveRecord(
        factors=_tile, local=_local_tile, local_by_shape=True, algebra="linear"
    ),
    "transpose": PrimitiveRecord(
        factors=_transpose, fusion="indexing", movement="shape", algebra="linear"
    ),
    "unstack": PrimitiveRecord(factors=_unstack, algebra="linear"),
}
