"""The rule table: for each primitive, what its equation does to array dims (`OpFactors`).

To teach the planner a primitive, write a function from its equation to `OpFactors` and enter it in `RULES`; a pointwise one
only needs its name in `POINTWISE`.
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod

from jax.extend.core import JaxprEqn

from autopar.graph import Atom, aval_of
from autopar.sharding.factors import Dims, FactorBuilder, Kind, OpFactors

POINTWISE = frozenset({
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"),
    *("clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le"),
    *("lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not"),
    *("one_minus_square", "or", "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt"),
    *("select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt"),
    *("square", "stop_gradient", "sub", "tan", "tanh", "xor"),
})  # fmt: skip
"""Primitives that work on each element alone; operands may be scalars or have dims of size one."""

PASS_THROUGH = frozenset({"accumulate", "optimization_barrier", "sharding_constraint"})
"""Primitives whose i-th result is their i-th operand."""


class MissingRuleError(NotImplementedError):
    """The step uses a primitive that the planner has no rule for."""

    def __init__(self, eqn: JaxprEqn) -> None:
        shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        super().__init__(
            f"no sharding rule for primitive {eqn.primitive.name!r}, used as ({shapes}) -> ({results})"
            f" in {str(eqn.source_info.name_stack) or 'the step'}; rules live in RULES of autopar/sharding/rules.py"
        )


def op_factors(eqn: JaxprEqn) -> OpFactors:
    """The factors of `eqn`, from the rule of its primitive.

    Raises:
        MissingRuleError: there is no rule for the primitive.
    """
    name = eqn.primitive.name
    if name in POINTWISE:
        return _pointwise(eqn)
    if name not in RULES:
        raise MissingRuleError(eqn)
    return RULES[name](eqn)


def _pointwise(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    out = _shape(eqn.outvars[0])
    result = build.dims(out)

    def operand(shape: tuple[int, ...]) -> Dims:
        if not shape:
            return ()
        return tuple(factors if size == full else () for size, full, factors in zip(shape, out, result, strict=True))

    return build.build([operand(_shape(v)) for v in eqn.invars], [result])


def _broadcast_in_dim(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    result = build.dims(eqn.params["shape"])
    shape = _shape(eqn.invars[0])
    source = tuple(
        result[target] if size == eqn.params["shape"][target] else ()
        for size, target in zip(shape, eqn.params["broadcast_dimensions"], strict=True)
    )
    return build.build([source, *((),) * (len(eqn.invars) - 1)], [result])


def _transpose(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    operand = build.dims(_shape(eqn.invars[0]))
    return build.build([operand], [tuple(operand[dim] for dim in eqn.params["permutation"])])


def _reshape(eqn: JaxprEqn) -> OpFactors:
    """Dims are matched from the left; a group of dims that merges or splits becomes one factor per piece, major first."""
    build = FactorBuilder()
    source, target = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
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


def _regroup(sizes: tuple[int, ...], split: list[int], factors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
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


def _squeeze(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    operand = build.dims(_shape(eqn.invars[0]))
    dropped = eqn.params["dimensions"]
    return build.build([operand], [tuple(dims for dim, dims in enumerate(operand) if dim not in dropped)])


def _reduction(kind: Kind) -> Callable[[JaxprEqn], OpFactors]:
    def rule(eqn: JaxprEqn) -> OpFactors:
        build = FactorBuilder()
        axes = eqn.params["axes"]
        operand = tuple(
            build.new(size, kind if dim in axes else "parallel") for dim, size in enumerate(_shape(eqn.invars[0]))
        )
        return build.build([operand], [tuple(dims for dim, dims in enumerate(operand) if dim not in axes)])

    return rule


def _along(parameter: str) -> Callable[[JaxprEqn], OpFactors]:
    """Primitives that need one dim (or several) whole, and keep the others: slices, sorts, scans along an axis."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        axes = eqn.params[parameter]
        return _whole_along(eqn, (axes,) if isinstance(axes, int) else tuple(axes))

    return rule


def _resized(eqn: JaxprEqn) -> OpFactors:
    """Primitives with as many dims in as out, that keep the dims whose size does not change (slices)."""
    out = _shape(eqn.outvars[0])
    touched = {
        dim
        for atom in eqn.invars
        if len(_shape(atom)) == len(out)
        for dim, size in enumerate(_shape(atom))
        if size != out[dim]
    }
    return _whole_along(eqn, tuple(touched))


def _pad(eqn: JaxprEqn) -> OpFactors:
    config = eqn.params["padding_config"]
    return _whole_along(eqn, tuple(dim for dim, amounts in enumerate(config) if any(amounts)))


def _whole_along(eqn: JaxprEqn, axes: tuple[int, ...]) -> OpFactors:
    build = FactorBuilder()
    rank = len(_shape(eqn.outvars[0]))
    axes = tuple(axis % rank for axis in axes)
    kept = tuple(() if dim in axes else build.new(size) for dim, size in enumerate(_shape(eqn.outvars[0])))

    def dims(atom: Atom) -> Dims:
        shape = _shape(atom)
        if len(shape) != rank:
            return ((),) * len(shape)
        return tuple(build.new(shape[dim], "whole") if dim in axes else kept[dim] for dim in range(rank))

    return build.build([dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars])


def _iota(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    return build.build([((),) * len(_shape(v)) for v in eqn.invars], [build.dims(_shape(eqn.outvars[0]))])


def _dot_general(eqn: JaxprEqn) -> OpFactors:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs_shape, rhs_shape = _shape(eqn.invars[0]), _shape(eqn.invars[1])
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
    operands = [tuple(lhs[d] for d in range(len(lhs_shape))), tuple(rhs[d] for d in range(len(rhs_shape)))]
    return build.build(operands, [tuple(result)], decides=True)


def _gather(eqn: JaxprEqn) -> OpFactors:
    """Dims that are sliced to one element may be sharded: each device looks up what it has, and the results add up."""
    numbers, slice_sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_shape, indices_shape, out_shape = _shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])
    build = FactorBuilder()
    indices = (*build.dims(indices_shape[:-1]), ())
    looked_up = iter(indices[:-1])
    result = [() if dim in numbers.offset_dims else next(looked_up) for dim in range(len(out_shape))]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    offsets = iter(sorted(numbers.offset_dims))
    operand = []
    for dim, size in enumerate(operand_shape):
        if dim in batching:
            operand.append(indices[batching[dim]])
        elif dim in numbers.collapsed_slice_dims:
            operand.append(build.new(size, "sum"))
        else:
            offset = next(offsets)
            operand.append(build.new(size, "parallel" if slice_sizes[dim] == size else "whole"))
            result[offset] = operand[-1] if slice_sizes[dim] == size else build.new(slice_sizes[dim], "whole")
    return build.build([tuple(operand), indices], [tuple(result)], decides=True)


def _scatter(combine: Kind) -> Callable[[JaxprEqn], OpFactors]:
    """Scattered-to dims may be sharded (each device keeps what is its own); update dims as `combine` says."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        numbers = eqn.params["dimension_numbers"]
        operand_shape, indices_shape, updates_shape = (_shape(v) for v in eqn.invars)
        build = FactorBuilder()
        batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        batched = set(batching.values())
        indices = tuple(
            build.new(size, "parallel" if dim in batched else combine) for dim, size in enumerate(indices_shape[:-1])
        )
        scattered = iter(indices)
        updates = [() if dim in numbers.update_window_dims else next(scattered) for dim in range(len(updates_shape))]
        windows = iter(sorted(numbers.update_window_dims))
        operand = []
        for dim, size in enumerate(operand_shape):
            if dim in batching:
                operand.append(indices[batching[dim]])
            elif dim in numbers.inserted_window_dims:
                operand.append(build.new(size))
            else:
                window = next(windows)
                full = updates_shape[window] == size
                operand.append(build.new(size, "parallel" if full else "whole"))
                updates[window] = operand[-1] if full else build.new(updates_shape[window], "whole")
        return build.build([tuple(operand), (*indices, ()), tuple(updates)], [tuple(operand)], decides=True)

    return rule


def _shape(atom: Atom) -> tuple[int, ...]:
    return aval_of(atom).shape


RULES: dict[str, Callable[[JaxprEqn], OpFactors]] = {
    "argmax": _reduction("whole"),
    "argmin": _reduction("whole"),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _along("dimension"),
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "dot_general": _dot_general,
    "dynamic_slice": _resized,
    "dynamic_update_slice": _resized,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduction("whole"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("max"),
    "reduce_or": _reduction("whole"),
    "reduce_prod": _reduction("whole"),
    "reduce_sum": _reduction("sum"),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "scatter": _scatter("whole"),
    "scatter-add": _scatter("sum"),
    "slice": _resized,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}
