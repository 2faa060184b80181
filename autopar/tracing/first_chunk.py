"""The first chunk of an accumulation loop, where a step computes it before the loop.

The sum of gradients may start with those of the first chunk, as in `accumulate_gradient` of
big_vision. If the loop does the same with the other chunks, it is rewritten to start with zeros and
to take all chunks. The equations of the first chunk and those of an iteration are compared, from
the sums backwards. They may differ in values that depend on no weights, such as the examples of a
chunk or its number. These values become slices of the new loop.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from autopar.ir.equation_groups import dependents
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.graph import Atom, aval_of, needed
from autopar.tracing.chunk_loop import (
    ChunkLoop,
    is_same_cast,
    loop_equations,
    value_of,
    variables,
)

_DEPTH = 50
"""How many equations without weights are compared, each of which reads the result of the next."""


def with_first_chunk(jaxpr: Jaxpr, loop: ChunkLoop, of_model: set[Var]) -> tuple[Jaxpr, ChunkLoop]:
    """Return a step and its accumulation loop, with the chunk that the loop starts with in it.

    Args:
        jaxpr: The step, flat but for its loops.
        loop: The loop.
        of_model: The values of the step that depend on weights.

    Returns:
        The step and the loop; as they are if no sum starts with a value that depends on weights, or
        if the loop may compute something else than that value.
    """
    carries = zip(range(len(loop.init)), loop.additive, strict=True)
    sums = [k for k, adds in carries if adds and not of_model.isdisjoint(variables([loop.init[k]]))]
    if not sums:
        return jaxpr, loop
    others = [k for k in range(len(loop.init)) if k not in sums]
    inputs = zip(loop.body.invars, (*loop.consts, *loop.init, *loop.arrays), strict=True)
    weights = [var for var, atom in inputs if isinstance(atom, Var) and atom in of_model]
    of_model = of_model | dependents(enumerate(loop.body.eqns), weights)
    fixed = [*(loop.init[k] for k in others), *(loop.handed_on[k] for k in others), *loop.stacked]
    if not of_model.isdisjoint(variables(fixed)):
        return jaxpr, loop
    comparison = _Comparison(jaxpr, loop, of_model)
    addends = [loop.addend(loop.carries[k]) for k in sums]
    if not comparison.are_equal(addends, [loop.init[k] for k in sums]):
        return jaxpr, loop
    return _joined(jaxpr, loop, sums, comparison.differing)


def _joined(
    jaxpr: Jaxpr, loop: ChunkLoop, sums: Sequence[int], differing: dict[Var, Atom]
) -> tuple[Jaxpr, ChunkLoop]:
    """Return the step and its loop with the first chunk in the loop.

    Args:
        jaxpr: The step.
        loop: Its loop.
        sums: The numbers of the carries that start with sums of the first chunk.
        differing: For each value of an iteration that differs between the chunks, that of the
            first chunk.
    """
    others = [k for k in range(len(loop.init)) if k not in sums]
    slices = list(differing)
    ends = [loop.handed_on[k] for k in others]
    rows = [*loop.stacked, *slices]
    eqns = needed(enumerate(loop.body.eqns), [*ends, *rows])
    constants = dict(zip(loop.body.constvars, loop.body.consts, strict=True))
    names = [loop.carries[k] for k in others]

    def prepare(consts: list, init: list, arrays: list, firsts: list) -> list[jax.Array]:
        """Compute what does not depend on weights, and put the values of all chunks together."""
        env: dict[Var, Any] = constants | dict(zip(loop.body.invars, consts, strict=False))

        def body(carry: list, row: list) -> tuple[list, list]:
            inner = env | dict(zip((*names, *loop.slices), (*carry, *row), strict=True))
            evaluate(eqns, inner, unchanged, unchanged)
            return [value_of(atom, inner) for atom in ends], [
                value_of(atom, inner) for atom in rows
            ]

        last, stacked = jax.lax.scan(body, init, arrays, loop.length, loop.is_reversed)
        own = stacked[len(loop.stacked) :]
        whole = [
            jnp.concatenate([first[None], row]) for first, row in zip(firsts, own, strict=True)
        ]
        return [*last, *stacked[: len(loop.stacked)], *whole]

    length = loop.length + 1
    arrays = [Var(aval_of(var).update(shape=(length, *aval_of(var).shape))) for var in slices]
    zeros = [Var(aval_of(loop.init[k])) for k in sums]
    groups = [
        loop.consts,
        [loop.init[k] for k in others],
        loop.arrays,
        [differing[var] for var in slices],
    ]
    results = [*(loop.results[k] for k in others), *loop.results[len(loop.init) :], *arrays]
    source = loop.eqn.source_info
    prepared = [
        *loop_equations(prepare, groups, results, source),
        *loop_equations(lambda: list(map(_zeros, zeros)), [], zeros, source),
    ]
    inputs = [*loop.body.invars[: len(loop.consts)], *(loop.carries[k] for k in sums), *slices]
    outvars = [loop.handed_on[k] for k in sums]
    body = loop.body.replace(
        invars=inputs,
        outvars=outvars,
        eqns=[eqn for _, eqn in needed(enumerate(loop.body.eqns), outvars, inputs)],
        debug_info=loop.body.debug_info.with_unknown_names(),
    )
    operands = loop.consts, zeros, arrays
    totals = [loop.results[k] for k in sums]
    eqn = loop.eqn.replace(invars=[atom for group in operands for atom in group], outvars=totals)
    number = jaxpr.eqns.index(loop.eqn)
    step = [*jaxpr.eqns[:number], *prepared, eqn, *jaxpr.eqns[number + 1 :]]
    jaxpr = jaxpr.replace(eqns=[each for _, each in needed(enumerate(step), jaxpr.outvars)])
    return jaxpr, ChunkLoop(eqn, body, *operands, totals, length, is_reversed=False)


def _zeros(var: Var) -> jax.Array:
    return jnp.zeros(aval_of(var).shape, aval_of(var).dtype)


class _Comparison:
    """Compares what an iteration of a loop computes with what a step computes before the loop.

    Attributes:
        differing: For each value of the iteration that may differ from the one of the step, and
            depends on no weights, that of the step.
    """

    def __init__(self, jaxpr: Jaxpr, loop: ChunkLoop, of_model: Collection[Var]) -> None:
        """Begin a comparison.

        Args:
            jaxpr: The step.
            loop: The loop.
            of_model: The values of the step and of the body that depend on weights.
        """
        self.differing: dict[Var, Atom] = {}
        self._of_model = of_model
        self._maker = {
            var: (eqn, k)
            for eqn in (*jaxpr.eqns, *loop.body.eqns)
            for k, var in enumerate(eqn.outvars)
        }
        self._constants = {
            var: value
            for each in (jaxpr, loop.body)
            for var, value in zip(each.constvars, each.consts, strict=True)
        }
        consts = map(self._without_casts, loop.consts)
        self._equal: dict[Var, Atom] = dict(zip(loop.body.invars, consts, strict=False))

    def are_equal(self, inner: Sequence[Atom], outer: Sequence[Atom]) -> bool:
        """Return whether values of the body equal values of the step, but for `differing`.

        Args:
            inner: The values of the body.
            outer: The values of the step.
        """
        pending = list(zip(inner, outer, strict=True))
        while pending:
            ours, theirs = pending.pop()
            theirs = self._without_casts(theirs)
            if not isinstance(ours, Var) or ours not in self._of_model:
                if not self._is_given(ours, theirs, _DEPTH):
                    return False
            elif ours not in self._equal:
                operands = self._operands(ours, theirs)
                if operands is None:
                    return False
                self._equal[ours] = theirs
                pending += operands
            elif self._equal[ours] is not theirs:
                return False
        return True

    def _is_given(self, ours: Atom, theirs: Atom, depth: int) -> bool:
        """Return whether values without weights are equal, or may become slices of the loop."""
        if isinstance(theirs, Var) and theirs in self._of_model:
            return False
        if isinstance(ours, Literal):
            return isinstance(theirs, Literal) and _is_same(ours, theirs)
        if ours in self._equal:
            return _is_same(self._equal[ours], theirs)
        known = dict(self._equal), dict(self.differing)
        operands = self._operands(ours, theirs) if depth else None
        if operands is not None and all(
            self._is_given(mine, self._without_casts(other), depth - 1) for mine, other in operands
        ):
            self._equal[ours] = theirs
            return True
        self._equal, self.differing = known
        mine, other = aval_of(ours), aval_of(theirs)
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return False
        self._equal[ours] = self.differing[ours] = theirs
        return True

    def _operands(self, ours: Atom, theirs: Atom) -> list[tuple[Atom, Atom]] | None:
        """Return pairs of operands whose equality makes two values equal; None if none do."""
        if not isinstance(ours, Var) or not isinstance(theirs, Var):
            return None
        if ours in self._constants and theirs in self._constants:
            same = np.array_equal(*(self._constants[var] for var in (ours, theirs)))
            return [] if same else None
        if ours not in self._maker or theirs not in self._maker:
            return None
        (mine, position), (other, place) = self._maker[ours], self._maker[theirs]
        if position != place or not _are_alike(mine, other):
            return None
        return list(zip(mine.invars, other.invars, strict=True))

    def _without_casts(self, atom: Atom) -> Atom:
        """Return what a value was before casts to its own dtype."""
        while isinstance(atom, Var) and atom in self._maker and is_same_cast(self._maker[atom][0]):
            (atom,) = self._maker[atom][0].invars
        return atom


def _is_same(one: Atom, other: Atom) -> bool:
    if isinstance(one, Literal) and isinstance(other, Literal):
        mine, theirs = np.asarray(one.val), np.asarray(other.val)
        return mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()
    return one is other


def _are_alike(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Return whether two equations compute the same from equal operands."""
    return (
        one.primitive is other.primitive
        and not one.effects
        and not other.effects
        and len(one.invars) == len(other.invars)
        and one.params.keys() == other.params.keys()
        and all(_is_same_param(value, other.params[key]) for key, value in one.params.items())
    )


def _is_same_param(one: Any, other: Any) -> bool:
    if isinstance(one, Jaxpr) and isinstance(other, Jaxpr):
        pairs = zip(_constants(one), _constants(other), strict=True)
        return str(one) == str(other) and all(np.array_equal(*pair) for pair in pairs)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_param, one, other))
    return type(one) is type(other) and bool(np.all(one == other))


def _constants(jaxpr: Jaxpr) -> Iterable[Any]:
    """Yield the constants of a jaxpr and of all jaxprs in it."""
    yield from jaxpr.consts
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from _constants(inner)
