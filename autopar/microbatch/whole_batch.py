"""Join two traces of a step: what runs for a microbatch, and what runs once, for the whole batch.

The size of the batch is a number of the trace. In `g / batch.shape[0]` after the gradient it is the size of the whole batch, and so
are the shape of `jnp.arange(batch.shape[0])` and a counter of examples. So the equations up to the accumulated values come from a
trace for one microbatch, and those after them from a trace for the whole batch.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir import graph
from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import Atom
from autopar.microbatch.gradients import accumulate_p

type Names = dict[Var, Atom]
"""Maps variables of the whole batch's trace to those of the joined one."""


def join_traces(
    micro: Jaxpr,
    whole: Jaxpr,
    body: Collection[int],
    tail: Collection[int],
    computed: Collection[tuple[int, int]],
) -> tuple[Jaxpr, dict[int, int]]:
    """Join the equations `body` of a microbatch and `tail` of the whole batch.

    An equation that is needed in both and is the same in both stands in the result once.

    Args:
        micro, whole: flat jaxprs of the step, with the same `accumulate` equations.
        body: numbers of equations of `micro`, without the `accumulate` equations.
        tail: numbers of equations of `whole`, likewise.
        computed: operands of `accumulate` equations, by the positions of both, that the tail computes for the whole batch instead.

    Returns:
        The jaxpr, and for each equation of `micro` that is in it the number there.
    """
    names: Names = dict(zip(whole.invars, micro.invars, strict=True))
    constants = dict(zip(micro.constvars, micro.consts, strict=True))
    same = {id(value): var for var, value in constants.items()}
    for var, value in zip(whole.constvars, whole.consts, strict=True):
        twin = same.get(id(value)) or next(
            (mine for mine, known in constants.items() if _equal(known, value)), None
        )
        if twin is None:
            constants[var] = value
        else:
            names[var] = twin
    marks = _marks(micro, whole, computed, names)
    aligned = [eqn.primitive for eqn in micro.eqns] == [eqn.primitive for eqn in whole.eqns]
    ours, theirs = units(enumerate(micro.eqns)), units(enumerate(whole.eqns))
    pairs: Iterable[tuple[Unit | None, Unit | None]] = (
        zip(ours, theirs, strict=True)
        if aligned
        else [*((unit, None) for unit in ours), *((None, unit) for unit in theirs)]
    )
    eqns: list[JaxprEqn] = []
    numbers: dict[int, int] = {}
    for mine, other in pairs:
        once = [each for each in other.eqns if each[0] in tail] if other else []
        repeated = [each for each in mine.eqns if each[0] in body] if mine else []
        if mine is not None and mine.number in marks:
            repeated, once = [(mine.number, marks[mine.number])], []
        shared = aligned and bool(once) and bool(repeated)
        if shared and mine is not None and other is not None and _same(mine, other, names):
            kept = {number for number, _ in (*once, *repeated)}
            repeated, once = [each for each in mine.eqns if each[0] in kept], []
        for number, eqn in repeated:
            numbers[number] = len(eqns)
            eqns.append(eqn)
        for number, eqn in once:
            if not repeated and aligned:
                numbers[number] = len(eqns)
            eqns.append(eqn.replace(invars=[_named(atom, names) for atom in eqn.invars]))
    outvars = [_named(atom, names) for atom in whole.outvars]
    return micro.replace(
        eqns=eqns, outvars=outvars, constvars=list(constants), consts=list(constants.values())
    ), numbers


def substitute_operands(whole: Jaxpr, computed: Collection[tuple[int, int]]) -> Jaxpr:
    """Return `whole` with results of its `accumulate` equations replaced by their operands, at the positions `computed`."""
    names: Names = {}
    for position, eqn in enumerate(eqn for eqn in whole.eqns if eqn.primitive is accumulate_p):
        names.update(
            (var, eqn.invars[k]) for k, var in enumerate(eqn.outvars) if (position, k) in computed
        )
    if not names:
        return whole
    eqns = [
        eqn
        if names.keys().isdisjoint(a for a in eqn.invars if isinstance(a, Var))
        else _renamed(eqn, names)
        for eqn in whole.eqns
    ]
    return whole.replace(eqns=eqns, outvars=[_named(atom, names) for atom in whole.outvars])


def _marks(
    micro: Jaxpr, whole: Jaxpr, computed: Collection[tuple[int, int]], names: Names
) -> dict[int, JaxprEqn]:
    """Return the `accumulate` equations of `micro` without the operands that are `computed`; enter their results in `names`."""
    ours = [(number, eqn) for number, eqn in enumerate(micro.eqns) if eqn.primitive is accumulate_p]
    theirs = [eqn for eqn in whole.eqns if eqn.primitive is accumulate_p]
    found: dict[int, JaxprEqn] = {}
    for position, ((number, mine), other) in enumerate(zip(ours, theirs, strict=True)):
        names.update(zip(other.outvars, mine.outvars, strict=True))
        kept = [k for k in range(len(mine.outvars)) if (position, k) not in computed]
        found[number] = mine.replace(
            invars=[mine.invars[k] for k in kept], outvars=[mine.outvars[k] for k in kept]
        )
    return found


def _same(mine: Unit, other: Unit, names: Names) -> bool:
    """Return whether two units apply the same primitive to the same operands; if so, enter the results of `other` in `names`."""
    local: Names = {}

    def named(atom: Atom) -> Atom:
        return local.get(atom, _named(atom, names)) if isinstance(atom, Var) else atom

    for (_, a), (_, b) in zip(mine.eqns, other.eqns, strict=True):
        if [var.aval for var in a.outvars] != [var.aval for var in b.outvars]:
            return False
        if not all(_is(x, named(y)) for x, y in zip(a.invars, b.invars, strict=True)):
            return False
        if graph.params_text(a) != graph.params_text(b):
            return False
        local.update(zip(b.outvars, a.outvars, strict=True))
    names.update(local)
    return True


def _is(a: Atom, b: Atom) -> bool:
    if isinstance(a, Literal) and isinstance(b, Literal):
        return a.aval == b.aval and np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()
    return a is b


def _equal(a: Any, b: Any) -> bool:
    """Return whether two constants have the same dtype, shape and bytes."""
    if (np.shape(a), getattr(a, "dtype", None)) != (np.shape(b), getattr(b, "dtype", None)):
        return False
    return graph.constant(a).tobytes() == graph.constant(b).tobytes()


def _named(atom: Atom, names: Names) -> Atom:
    return names.get(atom, atom) if isinstance(atom, Var) else atom


def _renamed(eqn: JaxprEqn, names: Names) -> JaxprEqn:
    return eqn.replace(invars=[_named(atom, names) for atom in eqn.invars])
