"""Deferred division: divide by a statistic of the batch after the last microbatch.

A masked mean of the batch is not the mean of the masked means of its microbatches, because these
have different weights. But accumulated values are linear in the quotient. So numerators are
accumulated undivided, weights are accumulated too, and the division follows when both are complete.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of

type Weights = Mapping[int, Sequence[Var | None]]
"""Maps the number of an `accumulate` equation to the divisor of each of its operands, or None."""

type Functions = Mapping[Var, JaxprEqn]
"""Maps each scalar that is a function of statistics of the batch to its equation."""


def defer_divisions(
    jaxpr: Jaxpr, divided: Collection[int], weights: Weights, functions: Functions
) -> tuple[Jaxpr, list[int]]:
    """Move divisions by statistics of the batch after their accumulation.

    In the result the equations `divided` divide by 1. The `accumulate` equations get further
    operands: the statistics that they are divided by, or that their divisors are computed from.
    After each of them, functions of these statistics are computed, and its results are divided.

    Args:
        jaxpr: flat jaxpr of the step.
        divided: numbers of the divisions to defer.
        weights: divisors of the accumulated values.
        functions: the scalars that are functions of statistics.

    Returns:
        The new jaxpr, and for each equation of `jaxpr` its number in it.
    """
    eqns: list[JaxprEqn] = []
    numbers: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        numbers.append(len(eqns))
        if number in divided:
            numerator, divisor = eqn.invars
            one = Literal(np.ones((), aval_of(divisor).dtype), aval_of(divisor))
            eqns.append(eqn.replace(invars=[numerator, one]))
        elif number in weights:
            eqns.extend(_accumulated(eqn, weights[number], functions))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), numbers


def statistics(operands: Iterable[Atom | None], functions: Functions) -> list[Var]:
    """Return the statistics that `operands` are or depend on; None and literals have none."""
    result: dict[Var, None] = {}
    for atom in operands:
        if isinstance(atom, Var):
            if atom in functions:
                result.update(dict.fromkeys(statistics(functions[atom].invars, functions)))
            else:
                result[atom] = None
    return list(result)


def _accumulated(
    mark: JaxprEqn, weights: Sequence[Var | None], functions: Functions
) -> list[JaxprEqn]:
    """Return the equations that accumulate statistics with the operands of `mark` and divide."""
    late = [atom if isinstance(atom, Var) and atom in functions else None for atom in mark.invars]
    totals: dict[Var, Var] = {
        var: Var(var.aval) for var in statistics([*late, *weights], functions)
    }
    added = [k for k, function in enumerate(late) if function is None]
    sums = {k: mark.outvars[k] if weights[k] is None else Var(mark.outvars[k].aval) for k in added}
    invars = [*(mark.invars[k] for k in added), *totals]
    eqns = [mark.replace(invars=invars, outvars=[*sums.values(), *totals.values()])]

    def complete(atom: Atom) -> Atom:
        """Return the value of `atom` for the whole batch."""
        if isinstance(atom, Var) and atom not in totals:
            eqn = functions[atom]
            operands = [complete(operand) for operand in eqn.invars]
            total = Var(atom.aval)
            totals[atom] = total
            eqns.append(eqn.replace(invars=operands, outvars=[total], source_info=mark.source_info))
        return totals[atom] if isinstance(atom, Var) else atom

    for k, (function, divisor) in enumerate(zip(late, weights, strict=True)):
        result = mark.outvars[k]
        if function is not None:
            eqn = functions[function]
            operands = [complete(operand) for operand in eqn.invars]
            eqns.append(
                eqn.replace(invars=operands, outvars=[result], source_info=mark.source_info)
            )
        elif divisor is not None:
            eqns += equations(_quotient, [sums[k], complete(divisor)], result, mark.source_info)
    return eqns


def equations(
    fun: Callable[..., jax.Array], operands: Sequence[Atom], result: Var, source_info: Any
) -> list[JaxprEqn]:
    """Return equations that compute `result` from `operands` as `fun` does.

    Args:
        fun: a function of arrays with one result.
        operands: the atoms that `fun` is applied to.
        result: the variable that the last equation assigns.
        source_info: source and name stack of the equations.
    """
    avals = [aval_of(atom) for atom in operands]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    traced = flatten(jax.make_jaxpr(fun)(*shapes))
    return inlined(traced, operands, [result], source_info)


def inlined(
    jaxpr: Jaxpr, operands: Iterable[Atom], results: Iterable[Var], source_info: Any
) -> list[JaxprEqn]:
    """Return the equations of a jaxpr without constants, with other names and another source.

    Args:
        jaxpr: the jaxpr.
        operands: what it is applied to.
        results: the variables that its last equations assign.
        source_info: source and name stack of the equations.
    """
    names: dict[Atom, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    names |= zip(jaxpr.outvars, results, strict=True)

    def renamed(atoms: Sequence[Atom]) -> list:
        return [
            atom if isinstance(atom, Literal) else names.setdefault(atom, Var(atom.aval))
            for atom in atoms
        ]

    return [
        eqn.replace(
            invars=renamed(eqn.invars), outvars=renamed(eqn.outvars), source_info=source_info
        )
        for eqn in jaxpr.eqns
    ]


def _quotient(total: jax.Array, divisor: jax.Array) -> jax.Array:
    return (total / divisor).astype(total.dtype)
