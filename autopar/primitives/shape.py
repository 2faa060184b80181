"""Primitives that rearrange elements: broadcasts, reshapes, transposes, slices, padding, joins and splits."""

from itertools import pairwise
from math import prod

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.rule_helpers import Rule, along, leading, shape_of, whole_along


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
    """The copies of a dim are its major factor."""
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
    """Slices and their updates: dims that are taken in full go through."""
    out = shape_of(eqn.outvars[0])
    shapes = [shape for shape in map(shape_of, eqn.invars) if len(shape) == len(out)]
    return whole_along(
        eqn, {dim for shape in shapes for dim, size in enumerate(shape) if size != out[dim]}
    )


def _pad(eqn: JaxprEqn) -> OpFactors:
    return whole_along(
        eqn, [dim for dim, amounts in enumerate(eqn.params["padding_config"]) if any(amounts)]
    )


def _bitcast(eqn: JaxprEqn) -> OpFactors:
    """Between types of different width the last dim of the narrower one holds the pieces of one element."""
    return leading(eqn, min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))))


def _reshape(eqn: JaxprEqn) -> OpFactors:
    """Dims are matched from the left; a group of dims that merges or splits becomes one factor per piece, major first."""
    build = FactorBuilder()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
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
    """The coarsest list of sizes of which both `left` and `right` are groupings, or None."""

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


RULES: dict[str, Rule] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": along("dimension"),
    "dynamic_slice": _resized,
    "dynamic_update_slice": _resized,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": along("dimensions"),
    "slice": _resized,
    "split": along("axis"),
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
