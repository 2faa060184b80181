"""Dividing by a sum over the batch after the last microbatch instead of in each.

The weights of a microbatch are not those of the batch: a masked mean of the batch is no mean of masked means. But all that comes of
the division up to what is accumulated is linear in it, so the numerators can be accumulated undivided, the weights with them, and
divided when both are complete.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of

type Weights = Mapping[int, Sequence[Var | None]]
"""For each `accumulate` equation, by number, the scalars by which each of its operands is to be divided."""

type Functions = Mapping[Var, JaxprEqn]
"""The equation that makes each scalar that is a function of statistics of the batch."""


def defer_divisions(
    jaxpr: Jaxpr, divided: Collection[int], weights: Weights, functions: Functions
) -> tuple[Jaxpr, list[int]]:
    """Leave divisions by sums over the batch until everything is accumulated.

    In the result the divisions with the numbers `divided` divide by 1. What they divide by is accumulated after the other operands of an
    `accumulate` equation: a statistic itself, or those that a function is computed of (`statistics`). When they are complete,
    functions are computed and what was accumulated is divided.

    Returns:
        The jaxpr, and for each equation its number there.
    """
    eqns: list[JaxprEqn] = []
    numbers: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        numbers.append(len(eqns))
        if number in divided:
            top, by = eqn.invars
            one = Literal(np.ones((), aval_of(by).dtype), aval_of(by))
            eqns.append(eqn.replace(invars=[top, one]))
        elif number in weights:
            eqns.extend(_accumulated(eqn, weights[number], functions))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), numbers


def statistics(operands: Iterable[Atom | None], functions: Functions) -> list[Var]:
    """Return the statistics that `operands` are, or are computed of; None and literals have none."""
    found: dict[Var, None] = {}
    for atom in operands:
        if isinstance(atom, Var):
            if atom in functions:
                found.update(dict.fromkeys(statistics(functions[atom].invars, functions)))
            else:
                found[atom] = None
    return list(found)


def _accumulated(
    mark: JaxprEqn, weights: Sequence[Var | None], functions: Functions
) -> list[JaxprEqn]:
    late = [atom if isinstance(atom, Var) and atom in functions else None for atom in mark.invars]
    totals: dict[Var, Var] = {
        var: Var(var.aval) for var in statistics([*late, *weights], functions)
    }
    added = [k for k, function in enumerate(late) if function is None]
    sums = {k: mark.outvars[k] if weights[k] is None else Var(mark.outvars[k].aval) for k in added}
    invars = [*(mark.invars[k] for k in added), *totals]
    eqns = [mark.replace(invars=invars, outvars=[*sums.values(), *totals.values()])]

    def complete(atom: Atom) -> Atom:
        """The value of `atom` for the whole batch."""
        if isinstance(atom, Var) and atom not in totals:
            eqn = functions[atom]
            operands = [complete(operand) for operand in eqn.invars]
            totals[atom] = made = Var(atom.aval)
            eqns.append(eqn.replace(invars=operands, outvars=[made], source_info=mark.source_info))
        return totals[atom] if isinstance(atom, Var) else atom

    for k, (function, by) in enumerate(zip(late, weights, strict=True)):
        result = mark.outvars[k]
        if function is not None:
            eqn = functions[function]
            operands = [complete(operand) for operand in eqn.invars]
            eqns.append(
                eqn.replace(invars=operands, outvars=[result], source_info=mark.source_info)
            )
        elif by is not None:
            eqns += equations(_quotient, [sums[k], complete(by)], result, mark.source_info)
    return eqns


def equations(
    fun: Callable[..., jax.Array], operands: Sequence[Atom], result: Var, source_info: Any
) -> list[JaxprEqn]:
    """Return equations that make `result` of `operands` as `fun` does."""
    shapes = [jax.ShapeDtypeStruct(aval_of(each).shape, aval_of(each).dtype) for each in operands]
    traced = flatten(jax.make_jaxpr(fun)(*shapes))
    names: dict[Atom, Atom] = dict(zip(traced.invars, operands, strict=True))
    names[traced.outvars[0]] = result

    def renamed(atoms: Sequence[Atom]) -> list:
        return [
            atom if isinstance(atom, Literal) else names.setdefault(atom, Var(atom.aval))
            for atom in atoms
        ]

    return [
        eqn.replace(
            invars=renamed(eqn.invars), outvars=renamed(eqn.outvars), source_info=source_info
        )
        for eqn in traced.eqns
    ]


def _quotient(total: jax.Array, by: jax.Array) -> jax.Array:
    return (total / by).astype(total.dtype)
