"""Loops and branches: what their markers (see `autopar.ir.control_flow`) do to the dims of one value."""

from dataclasses import replace

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.rule_helpers import Rule, shape_of


def _same(eqn: JaxprEqn) -> OpFactors:
    """All operands but the token, and the result, have the same dims."""
    build = FactorBuilder()
    dims = build.dims(shape_of(eqn.outvars[0]))
    return build.build([*(dims for _ in eqn.invars[:-1]), ()], [dims])


def _placed(eqn: JaxprEqn) -> OpFactors:
    """What a loop holds in one place throughout: where, is worth a decision."""
    return replace(_same(eqn), decides=True)


def _held(eqn: JaxprEqn) -> OpFactors:
    """The carry stays where it was at the start."""
    return replace(_same(eqn), leader=0)


def _slice(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    dims = build.dims(shape_of(eqn.outvars[0]))
    return build.build([(*build.dims(shape_of(eqn.invars[0])[:1], "whole"), *dims), ()], [dims])


def _stack(eqn: JaxprEqn) -> OpFactors:
    build = FactorBuilder()
    dims = build.dims(shape_of(eqn.invars[0]))
    return build.build([dims, ()], [(*build.dims(shape_of(eqn.outvars[0])[:1], "whole"), *dims)])


def _token(eqn: JaxprEqn) -> OpFactors:
    return OpFactors((), (), ((),) * len(eqn.invars), ((),))


RULES: dict[str, Rule] = {
    "loop": _token,
    "switch": _token,
    "loop_const": _placed,
    "loop_carry": _placed,
    "loop_slice": _slice,
    "loop_result": _held,
    "loop_stack": _stack,
    "switch_result": _same,
}
