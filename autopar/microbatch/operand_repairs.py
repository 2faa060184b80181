"""Replacements of operands in a jaxpr, with which the step is separable.

A statistic of a microbatch is replaced by the statistic of the whole batch, which an earlier loop
over the microbatches accumulates. Other operands are divided by a power of the number of
microbatches.
"""

from collections.abc import Container, Mapping, Sequence
from functools import partial

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.control_flow import OPENING, loop_carry_p, token_of
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom
from autopar.ir.step_graph import Combine
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.microbatch.batch_statistics import Repair
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.gradients import accumulate_p


def numbered_repairs(body: Sequence[Numbered], found: BatchScalings) -> dict[int, Repair]:
    """Return the repairs of the equations of a body, by number."""
    return {
        number: found.repairs[eqn.outvars[0]]
        for number, eqn in body
        if eqn.outvars and eqn.outvars[0] in found.repairs
    }


def with_repairs(
    micro: Jaxpr,
    traced: Jaxpr,
    jaxpr: Jaxpr,
    numbers: Mapping[int, int],
    repairs: Mapping[int, Repair],
    found: BatchScalings,
) -> tuple[Jaxpr, list[int], dict[Var, Combine]]:
    """Return the step as it runs with operands replaced as `repairs` says.

    Args:
        micro: the step for one microbatch, with the equations of `traced`.
        traced: the trace that `found` describes.
        jaxpr: the step as it runs.
        numbers: maps the numbers of equations of `micro` to theirs in `jaxpr`.
        repairs: the replacements, by the numbers of equations of `micro`.
        found: the batch scalings of `traced`.

    Returns:
        The new jaxpr, for each equation its number in it, and for each statistic of the whole batch
        how the values of microbatches are combined.
    """
    totals: dict[Var, Var] = {}
    scalings: dict[Var, BatchScaling] = {}
    for number, repair in repairs.items():
        for k in repair.totals:
            var, known = micro.eqns[number].invars[k], traced.eqns[number].invars[k]
            assert isinstance(var, Var)
            totals.setdefault(var, Var(var.aval))
            scalings[var] = found.of(known, known)
    repair_at = {numbers[number]: repair for number, repair in repairs.items()}
    before = _by_place(jaxpr, repair_at)
    operands: dict[int, list[Atom]] = {}
    eqns: list[JaxprEqn] = []
    later: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        for repaired in before.get(number, ()):
            reader = jaxpr.eqns[repaired]
            operands[repaired] = list(reader.invars)
            for k in repair_at[repaired].totals:
                var = reader.invars[k]
                assert isinstance(var, Var)
                operands[repaired][k] = totals[var]
            for k, power in repair_at[repaired].scaled.items():
                operand = operands[repaired][k]
                scaled = Var(operand.aval)
                by = partial(_divided, found.count**power)
                eqns += equations(by, [operand], scaled, reader.source_info)
                operands[repaired][k] = scaled
        if number in operands:
            eqn = eqn.replace(invars=operands[number])
        later.append(len(eqns))
        eqns.append(eqn)
        for var in eqn.outvars:
            if var not in totals:
                continue
            operand, total = var, totals[var]
            if power := scalings[var].divisor_power:
                operand = Var(var.aval)
                by = partial(_divided, found.count**power)
                eqns += equations(by, [var], operand, eqn.source_info)
            eqns.append(
                eqn.replace(primitive=accumulate_p, invars=[operand], outvars=[total], params={})
            )
    combine: dict[Var, Combine] = {
        totals[var]: scaling.combine for var, scaling in scalings.items()
    }
    return jaxpr.replace(eqns=eqns), later, combine


def _by_place(jaxpr: Jaxpr, repaired: Container[int]) -> dict[int, list[int]]:
    """Return the repaired equations by the equation before which their operands are computed.

    The operand with which a loop starts is computed before the loop.
    """
    openings: dict[Var, int] = {}
    by_place: dict[int, list[int]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive in OPENING:
            openings[token_of(eqn)] = number
        if number in repaired:
            place = openings[token_of(eqn)] if eqn.primitive is loop_carry_p else number
            by_place.setdefault(place, []).append(number)
    return by_place


def _divided(by: float, value: jax.Array) -> jax.Array:
    return (value / by).astype(value.dtype)
