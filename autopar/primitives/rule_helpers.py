"""Building blocks of sharding rules, shared by the families of primitives."""

from collections.abc import Callable, Collection

from jax.extend.core import JaxprEqn

from autopar.ir.graph import Atom, aval_of
from autopar.primitives.factors import Dims, FactorBuilder, OpFactors

type ShardingRule = Callable[[JaxprEqn], OpFactors]
"""Maps an equation to its factors (`autopar.primitives.factors`)."""


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return the shape of a value."""
    return aval_of(atom).shape


def replicated(eqn: JaxprEqn) -> OpFactors:
    """Replicate every operand and result on every device."""
    return leading(eqn, 0)


def leading(eqn: JaxprEqn, count: int) -> OpFactors:
    """Share the first `count` dims among all operands and results; keep the others whole."""
    build = FactorBuilder()
    shared = build.dims(shape_of(eqn.invars[0])[:count]) if count else ()

    def dims(atom: Atom) -> Dims:
        return (*shared, *build.dims(shape_of(atom)[count:], "whole"))

    return build.build([dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars])


def leading_of_both(eqn: JaxprEqn) -> OpFactors:
    """Share the dims that operand and result both have; the last ones of the longer are whole."""
    return leading(eqn, min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))))


def whole_along(eqn: JaxprEqn, axes: Collection[int]) -> OpFactors:
    """Keep `axes` whole in operands and results, where their sizes may differ; share other dims.

    Operands of another rank (start indices, padding values) are whole.
    """
    build = FactorBuilder()
    out = shape_of(eqn.outvars[0])
    axes = {axis % len(out) for axis in axes}
    kept = tuple(() if dim in axes else build.new(size) for dim, size in enumerate(out))

    def dims(atom: Atom) -> Dims:
        shape = shape_of(atom)
        if len(shape) != len(out):
            return build.dims(shape, "whole")
        return tuple(
            build.new(shape[dim], "whole") if dim in axes else kept[dim] for dim in range(len(out))
        )

    return build.build([dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars])


def along(parameter: str) -> ShardingRule:
    """Return a rule that keeps whole the dims that `parameter` names, and shares the others."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        axes = eqn.params[parameter]
        return whole_along(eqn, axes if isinstance(axes, tuple) else (axes,))

    return rule
