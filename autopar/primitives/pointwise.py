"""Primitives that work on each element by itself."""

from dataclasses import replace

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import Dims, FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import shape_of


def pointwise(eqn: JaxprEqn) -> OpFactors:
    """Give all operands the dims of the result; scalars and dims of size one have no factors."""
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


_NONLINEAR = PrimitiveRecord(factors=pointwise, fusion="elementwise")
_SYMMETRIC = replace(_NONLINEAR, commutes=True)
_COSTLY = replace(_NONLINEAR, is_recomputed=False)
_LINEAR = replace(_NONLINEAR, algebra="linear")
_INVARIANT = replace(_NONLINEAR, algebra="invariant")
_SUM = replace(_NONLINEAR, algebra="sum")
_LARGEST = replace(_NONLINEAR, algebra="homogeneous", commutes=True)

_PLAIN = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
    exp exp2 expm1 floor log log1p log2 logistic nextafter not one_minus_square polygamma
    population_count pow reduce_precision rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sin sinh sqrt tan zeta
"""
_IN_LOOPS = ("igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta")
"""Primitives that XLA computes in a loop, until the last element of all devices converges."""

RECORDS = {
    **dict.fromkeys(_PLAIN.split(), _NONLINEAR),
    **dict.fromkeys(("ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "sign"), _INVARIANT),
    **dict.fromkeys(_IN_LOOPS, replace(_NONLINEAR, runs_on_shards=True)),
    "abs": replace(_NONLINEAR, algebra="homogeneous"),
    "add": replace(_SUM, commutes=True),
    "add_any": replace(_SUM, commutes=True),
    "and": _SYMMETRIC,
    "complex": _SUM,
    "conj": _LINEAR,
    "convert_element_type": replace(_LINEAR, movement="cast"),
    "copy": replace(_LINEAR, movement="shape"),
    "digamma": _COSTLY,
    "div": replace(_NONLINEAR, algebra="quotient"),
    **dict.fromkeys(("eq", "eq_to", "ne"), replace(_INVARIANT, commutes=True)),
    "erf": _COSTLY,
    "erf_inv": _COSTLY,
    "erfc": _COSTLY,
    "imag": _LINEAR,
    "integer_pow": replace(_NONLINEAR, algebra="power"),
    "lgamma": _COSTLY,
    "max": _LARGEST,
    "min": _LARGEST,
    "mul": replace(_NONLINEAR, algebra="product", commutes=True),
    "name": _LINEAR,
    "neg": _LINEAR,
    "or": _SYMMETRIC,
    "real": _LINEAR,
    "select_n": replace(_NONLINEAR, algebra="selection", data=slice(1, None)),
    "square": replace(_NONLINEAR, algebra="power"),
    "stop_gradient": replace(_LINEAR, movement="shape"),
    "sub": _SUM,
    "tanh": _COSTLY,
    "xor": _SYMMETRIC,
}
