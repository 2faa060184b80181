"""Reductions over dims, or over windows of dims."""

from math import prod

import numpy as np
from jax.extend.core import JaxprEqn

from autopar.ir.graph import aval_of
from autopar.primitives.equation_work import Shapes, elements, memory_kernel
from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.registry import Algebra, PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, shape_of, whole_along


def _reduction(kind: Kind, parameter: str = "axes") -> ShardingRule:
    """Return a rule whose reduced dims are of `kind`; initial values are scalars."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        build = FactorBuilder()
        reduced = eqn.params[parameter]
        shape = shape_of(eqn.invars[0])
        operand = tuple(
            build.new(size, kind if dim in reduced else "parallel")
            for dim, size in enumerate(shape)
        )
        result = tuple(dims for dim, dims in enumerate(operand) if dim not in reduced)
        count = len(eqn.outvars)
        return build.build([operand] * count + [()] * (len(eqn.invars) - count), [result] * count)

    return rule


def _logical(kind: Kind) -> ShardingRule:
    """Return the rule of `and` (a minimum of booleans) or `or` (a maximum).

    Reduced dims of integers are whole.
    """

    def rule(eqn: JaxprEqn) -> OpFactors:
        return _reduction(kind if aval_of(eqn.invars[0]).dtype == np.bool_ else "whole")(eqn)

    return rule


def _windowed(eqn: JaxprEqn) -> OpFactors:
    """Keep dims whole that have windows of several elements, strides, padding or dilation.

    Sharding them would need an exchange of halos.
    """
    ones = (1,) * len(eqn.params["window_dimensions"])
    windows = zip(
        eqn.params["window_dimensions"],
        eqn.params["window_strides"],
        eqn.params.get("base_dilation", ones),
        eqn.params.get("window_dilation", ones),
        eqn.params["padding"],
        strict=True,
    )
    return whole_along(
        eqn,
        [dim for dim, (*sizes, padding) in enumerate(windows) if set(sizes) != {1} or any(padding)],
    )


def _window_flops(eqn: JaxprEqn, operands: Shapes) -> float:
    """Count an element once for each window that reads it."""
    windows = zip(eqn.params["window_dimensions"], eqn.params["window_strides"], strict=True)
    return elements(eqn, operands) * prod(max(1.0, size / stride) for size, stride in windows)


def _window_record(
    algebra: Algebra | None = None, data: slice = slice(None), *, reduces: bool = True
) -> PrimitiveRecord:
    return PrimitiveRecord(
        factors=_windowed,
        work=memory_kernel(_window_flops),
        fusion="reduction" if reduces else "kernel",
        algebra=algebra,
        data=data,
    )


def _reduction_record(kind: Kind, algebra: Algebra | None = None) -> PrimitiveRecord:
    return PrimitiveRecord(factors=_reduction(kind), fusion="reduction", algebra=algebra)


RECORDS = {
    "argmax": PrimitiveRecord(factors=_reduction("whole"), fusion="input"),
    "argmin": PrimitiveRecord(factors=_reduction("whole"), fusion="input"),
    "reduce": PrimitiveRecord(factors=_reduction("whole", "dimensions")),
    "reduce_and": PrimitiveRecord(factors=_logical("min"), fusion="reduction"),
    "reduce_max": _reduction_record("max", "homogeneous"),
    "reduce_min": _reduction_record("min", "homogeneous"),
    "reduce_or": PrimitiveRecord(factors=_logical("max"), fusion="reduction"),
    "reduce_prod": _reduction_record("whole"),
    "reduce_sum": _reduction_record("sum", "linear"),
    "reduce_xor": _reduction_record("whole"),
    "reduce_window": _window_record(),
    "reduce_window_max": _window_record("homogeneous"),
    "reduce_window_min": _window_record(),
    "reduce_window_sum": _window_record("linear"),
    "select_and_gather_add": _window_record(reduces=False),
    "select_and_scatter": _window_record(reduces=False),
    "select_and_scatter_add": _window_record("linear", slice(1), reduces=False),
}
