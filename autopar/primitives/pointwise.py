"""Primitives that work on each element alone."""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import Dims, FactorBuilder, OpFactors
from autopar.primitives.rule_helpers import shape_of

POINTWISE = frozenset({
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e"),
    *("bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "cos", "cosh"),
    *("digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt"),
    *("igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log"),
    *("log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter"),
    *("not", "one_minus_square", "or", "polygamma", "population_count", "pow", "real", "reduce_precision"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    *("zeta",),
})  # fmt: skip
"""Primitives that work on each element alone; operands may be scalars or have dims of size one."""


def pointwise(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    out = shape_of(eqn.outvars[0])
    result = build.dims(out)

    def operand(shape: tuple[int, ...]) -> Dims:
        if not shape:
            return ()
        return tuple(
            factors if size == full else ()
            for size, full, factors in zip(shape, out, result, strict=True)
        )

    return build.build([operand(shape_of(v)) for v in eqn.invars], [result] * len(eqn.outvars))
