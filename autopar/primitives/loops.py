"""Markers of loops and branches (`autopar.ir.control_flow`), which keep the dims of values."""

from dataclasses import replace

from jax.extend.core import JaxprEqn

from autopar.ir import control_flow
from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import shape_of


def _same(eqn: JaxprEqn) -> OpFactors:
    """Give the result the dims of all operands but the token."""
    build = FactorBuilder()
    dims = build.dims(shape_of(eqn.outvars[0]))
    return build.build([*(dims for _ in eqn.invars[:-1]), ()], [dims])


def _decided(eqn: JaxprEqn) -> OpFactors:
    """Let the planner choose the sharding, which a loop keeps in all iterations."""
    return replace(_same(eqn), decides=True)


def _follows_carry(eqn: JaxprEqn) -> OpFactors:
    """Follow the carry, which keeps the sharding that it has before the loop."""
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


RECORDS = {
    control_flow.loop_p: PrimitiveRecord(factors=_token, runs_body=True),
    control_flow.switch_p: PrimitiveRecord(factors=_token),
    control_flow.loop_const_p: PrimitiveRecord(factors=_decided, is_view=True),
    control_flow.loop_carry_p: PrimitiveRecord(factors=_decided, is_view=True),
    control_flow.loop_slice_p: PrimitiveRecord(factors=_slice),
    control_flow.loop_result_p: PrimitiveRecord(factors=_follows_carry, is_view=True),
    control_flow.loop_stack_p: PrimitiveRecord(factors=_stack),
    control_flow.switch_result_p: PrimitiveRecord(factors=_same),
}
