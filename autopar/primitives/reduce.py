"""Reductions, over whole dims or over windows of them."""

import numpy as np
from jax.extend.core import JaxprEqn

from autopar.ir.graph import aval_of
from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.rule_helpers import Rule, shape_of, whole_along


def _reduction(kind: Kind, parameter: str = "axes") -> Rule:
    """Reduced dims as `kind` says; initial values, where there are any, are scalars."""

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


def _logical(kind: Kind) -> Rule:
    """`and` is the minimum of truth values, `or` the maximum; of integers they are neither."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        return _reduction(kind if aval_of(eqn.invars[0]).dtype == np.bool_ else "whole")(eqn)

    return rule


def _windowed(eqn: JaxprEqn) -> OpFactors:
    """Dims with more than one element in a window, or with a stride, padding or dilation, are whole: no halos."""
    ones = (1,) * len(eqn.params["window_dimensions"])
    each = zip(
        eqn.params["window_dimensions"],
        eqn.params["window_strides"],
        eqn.params.get("base_dilation", ones),
        eqn.params.get("window_dilation", ones),
        eqn.params["padding"],
        strict=True,
    )
    return whole_along(
        eqn,
        [dim for dim, (*sizes, padding) in enumerate(each) if set(sizes) != {1} or any(padding)],
    )


RULES: dict[str, Rule] = {
    "argmax": _reduction("whole"),
    "argmin": _reduction("whole"),
    "reduce": _reduction("whole", "dimensions"),
    "reduce_and": _logical("min"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_or": _logical("max"),
    "reduce_prod": _reduction("whole"),
    "reduce_sum": _reduction("sum"),
    "reduce_xor": _reduction("whole"),
    "reduce_window": _windowed,
    "reduce_window_max": _windowed,
    "reduce_window_min": _windowed,
    "reduce_window_sum": _windowed,
    "select_and_gather_add": _windowed,
    "select_and_scatter": _windowed,
    "select_and_scatter_add": _windowed,
}
