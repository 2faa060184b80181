"""Join two traces of a step, one for a microbatch and one for the whole batch.

A trace contains the size of the batch as a number. After the gradient, it has to be the size of the
whole batch: in `g / batch.shape[0]`, in `jnp.arange(batch.shape[0])` or in a counter of examples.
So the equations up to the accumulated values come from a trace for one microbatch, and the
equations after them come from a trace for the whole batch.
"""

from collections import ChainMap
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir import graph
from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import Atom
from autopar.microbatch.created_rows import created_by
from autopar.microbatch.gradients import accumulate_p

type Names = dict[Var, Atom]
"""Maps variables of the whole batch's trace to atoms of the joined jaxpr."""


def join_traces(
    micro: Jaxpr,
    whole: Jaxpr,
    body: Collection[int],
    tail: Collection[int],
) -> tuple[Jaxpr, dict[int, int]]:
    """Join the equations `body` of a microbatch and `tail` of the whole batch.

    An equation that both need, and that is the same in both traces, occurs once in the result.

    Args:
        micro: flat jaxpr of the step for one microbatch.
        whole: flat jaxpr of the step for the whole batch, with the same `accumulate` equations.
        body: numbers of equations of `micro`, without the `accumulate` equations.
        tail: numbers of equations of `whole`, without the `accumulate` equations.

    Returns:
        The joined jaxpr, and a map from the numbers of equations of `micro` to theirs in it.
    """
    names: Names = dict(zip(whole.invars, micro.invars, strict=True))
    constants = dict(zip(micro.constvars, micro.consts, strict=True))
    same = {id(value): var for var, value in constants.items()}
    for var, value in zip(whole.constvars, whole.consts, strict=True):
        twin = same.get(id(value)) or next(
            (mine for mine, constant in constants.items() if _equal(constant, value)), None
        )
        if twin is None:
            constants[var] = value
        else:
            names[var] = twin
    marks = _marks(micro, whole, names)
    aligned = list(map(created_by, micro.eqns)) == list(map(created_by, whole.eqns))
    ours, theirs = units(enumerate(micro.eqns)), units(enumerate(whole.eqns))
    pairs: Iterable[tuple[Unit | None, Unit | None]] = (
        zip(ours, theirs, strict=True)
        if aligned
        else [*((unit, None) for unit in ours), *((None, unit) for unit in theirs)]
    )
    eqns: list[JaxprEqn] = []
    numbers: dict[int, int] = {}
    for mine, other in pairs:
        once = [(n, eqn) for n, eqn in other.eqns if n in tail] if other else []
        repeated = [(n, eqn) for n, eqn in mine.eqns if n in body] if mine else []
        if mine is not None and mine.number in marks:
            repeated = [(mine.number, marks[mine.number])]
            once = []
        shared = aligned and bool(once) and bool(repeated)
        if shared and mine is not None and other is not None and _same(mine, other, names):
            kept = {number for number, _ in (*once, *repeated)}
            repeated = [(n, eqn) for n, eqn in mine.eqns if n in kept]
            once = []
        for number, eqn in repeated:
            numbers[number] = len(eqns)
            eqns.append(eqn)
        for number, eqn in once:
            if not repeated and aligned:
                numbers[number] = len(eqns)
            eqns.append(graph.rewired(eqn, names))
    outvars = graph.renamed(whole.outvars, names)
    return micro.replace(
        eqns=eqns, outvars=outvars, constvars=list(constants), consts=list(constants.values())
    ), numbers


def _marks(micro: Jaxpr, whole: Jaxpr, names: Names) -> dict[int, JaxprEqn]:
    """Return the `accumulate` equations of `micro`, by number, and add their results to `names`.

    Rows are joined to the rows of the whole batch.
    """
    ours = [(number, eqn) for number, eqn in enumerate(micro.eqns) if eqn.primitive is accumulate_p]
    theirs = [eqn for eqn in whole.eqns if eqn.primitive is accumulate_p]
    marks: dict[int, JaxprEqn] = {}
    for (number, mine), other in zip(ours, theirs, strict=True):
        totals = [
            total if total.aval == joined.aval else joined
            for total, joined in zip(mine.outvars, other.outvars, strict=True)
        ]
        names.update(zip(other.outvars, totals, strict=True))
        marks[number] = mine.replace(outvars=totals)
    return marks


def _same(mine: Unit, other: Unit, names: Names) -> bool:
    """Return whether two units apply the same primitives to the same operands.

    If they do, adds the results of `other` to `names`.
    """
    local: Names = {}
    for (_, a), (_, b) in zip(mine.eqns, other.eqns, strict=True):
        if [var.aval for var in a.outvars] != [var.aval for var in b.outvars]:
            return False
        operands = graph.renamed(b.invars, ChainMap(local, names))
        if not all(_is(x, y) for x, y in zip(a.invars, operands, strict=True)):
            return False
        if graph.params_text(a) != graph.params_text(b):
            return False
        local.update(zip(b.outvars, a.outvars, strict=True))
    names.update(local)
    return True


def _is(a: Atom, b: Atom) -> bool:
    if isinstance(a, Literal) and isinstance(b, Literal):
        return graph.literal_key(a) == graph.literal_key(b)
    return a is b


def _equal(a: Any, b: Any) -> bool:
    """Return whether two constants have the same dtype, shape and bytes."""
    if (np.shape(a), getattr(a, "dtype", None)) != (np.shape(b), getattr(b, "dtype", None)):
        return False
    return graph.constant(a).tobytes() == graph.constant(b).tobytes()
