"""Dividing by a sum over the batch after the last microbatch instead of in each.

The weights of a microbatch are not those of the batch: a masked mean of the batch is no mean of masked means. But all that comes of
the division up to what is accumulated is linear in it, so the numerators can be accumulated undivided, the weights with them, and
divided when both are complete.
"""

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.flatten import flatten
from autopar.graph import Atom, aval_of

type Weights = Mapping[int, Sequence[Var | None]]
"""For each `accumulate` equation, by number, the weights by which each of its operands is to be divided."""


def divided_afterwards(jaxpr: Jaxpr, divided: Collection[int], weights: Weights) -> tuple[Jaxpr, list[int]]:
    """A flat jaxpr in which the divisions with the numbers `divided` divide by 1, and what is accumulated is divided by the total of
    its weights; the weights are accumulated after the other operands.

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
            eqns.extend(_accumulated(eqn, weights[number]))
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), numbers


def unique(weights: Sequence[Var | None]) -> list[Var]:
    """The weights that a mark accumulates."""
    return list(dict.fromkeys(var for var in weights if var is not None))


def _accumulated(mark: JaxprEqn, weights: Sequence[Var | None]) -> list[JaxprEqn]:
    total_of = {var: Var(var.aval) for var in unique(weights)}
    sums = [var if by is None else Var(var.aval) for var, by in zip(mark.outvars, weights, strict=True)]
    eqns = [mark.replace(invars=[*mark.invars, *total_of], outvars=[*sums, *total_of.values()])]
    for total, quotient, by in zip(sums, mark.outvars, weights, strict=True):
        if by is not None:
            eqns += _division(total, total_of[by], quotient, mark)
    return eqns


def _division(total: Var, by: Var, quotient: Var, mark: JaxprEqn) -> list[JaxprEqn]:
    shapes = [jax.ShapeDtypeStruct(aval_of(each).shape, aval_of(each).dtype) for each in (total, by)]
    traced = flatten(jax.make_jaxpr(lambda total, by: (total / by).astype(total.dtype))(*shapes))
    names: dict[Atom, Atom] = dict(zip(traced.invars, (total, by), strict=True))
    names[traced.outvars[0]] = quotient

    def renamed(atoms: Sequence[Atom]) -> list:
        return [atom if isinstance(atom, Literal) else names.setdefault(atom, Var(atom.aval)) for atom in atoms]

    return [
        eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars), source_info=mark.source_info)
        for eqn in traced.eqns
    ]
