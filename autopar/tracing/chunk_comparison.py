"""Comparison of the equations that a step has for two chunks of its batch.

Two values correspond if their equations have the same primitive, parameters and corresponding
operands. Values that depend on no weights, such as the examples of a chunk, may differ.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from autopar.ir.graph import Atom, Where, aval_of, comparable, variables
from autopar.tracing.chunk_loop import is_same_cast

_DEPTH = 50
"""The longest chain of equations without weights that is compared."""

_LONGEST_VALUE = 80
"""The longest value, in characters, that a message has."""


class ChunkComparison:
    """A comparison of the first chunk with another one.

    Attributes:
        equal: the value of the other chunk that corresponds to a value of the first one. Values are
            only added, except by `forget_after`.
        differing: the part of `equal` whose two values may differ. They depend on no weights.
        unequal: the pair of values that the last comparison failed at; None if it succeeded.
    """

    def __init__(
        self,
        jaxprs: Sequence[Jaxpr],
        of_model: Collection[Var],
        constants: Mapping[Var, Atom] | None = None,
    ) -> None:
        """Compare nothing yet.

        Args:
            jaxprs: the jaxprs with the equations of both chunks, flat but for their loops.
            of_model: the values that depend on weights.
            constants: the value of the other chunk for inputs of the first chunk's jaxpr, such as
                the constants of a loop body.
        """
        self.differing: dict[Var, Atom] = {}
        self.unequal: tuple[Atom, Atom] | None = None
        self._of_model = of_model
        self._maker = {
            var: (eqn, k)
            for jaxpr in jaxprs
            for eqn in jaxpr.eqns
            for k, var in enumerate(eqn.outvars)
        }
        self._constants = {
            var: value
            for each in jaxprs
            for var, value in zip(each.constvars, each.consts, strict=True)
        }
        self.equal = {var: self._without_casts(atom) for var, atom in (constants or {}).items()}

    def are_equal(self, inner: Sequence[Atom], outer: Sequence[Atom]) -> bool:
        """Return whether values of two chunks correspond, and add them and their operands.

        Args:
            inner: the values of the first chunk.
            outer: the values of the other one.
        """
        pending = list(zip(inner, outer, strict=True))
        while pending:
            ours, theirs = self.unequal = pending.pop()
            theirs = self._without_casts(theirs)
            if not isinstance(ours, Var) or ours not in self._of_model:
                if not self._is_given(ours, theirs, _DEPTH):
                    return False
            elif ours not in self.equal:
                operands = [] if ours is theirs else self._operands(ours, theirs)
                if operands is None:
                    return False
                self.equal[ours] = theirs
                pending += operands
            elif self.equal[ours] is not theirs:
                return False
        self.unequal = None
        return True

    @property
    def num_known(self) -> tuple[int, int]:
        """The number of values in `equal` and in `differing`."""
        return len(self.equal), len(self.differing)

    def forget_after(self, num_known: tuple[int, int]) -> None:
        """Forget the values that were found since `num_known` was read."""
        for values, count in zip((self.equal, self.differing), num_known, strict=True):
            while len(values) > count:
                values.popitem()

    @property
    def difference(self) -> str:
        """The difference between the equations of `unequal`, for an error; "" without any."""
        eqns = [self._maker[var][0] for var in variables(self.unequal or ()) if var in self._maker]
        if len(eqns) < 2:
            return "".join(f"{Where(eqn)} is not in all of them" for eqn in eqns)
        one, other = eqns
        if one.primitive is not other.primitive:
            return f"{Where(one)} is {Where(other)} in another one"
        for key in one.params:
            values = [f"{key}={eqn.params.get(key)}" for eqn in eqns]
            if values[0] != values[1] and max(map(len, values)) < _LONGEST_VALUE:
                return f"{Where(one)} has {' and '.join(values)}"
        return f"{Where(one)} computes something else"

    def _is_given(self, ours: Atom, theirs: Atom, depth: int) -> bool:
        """Return whether two values may correspond, where the first one depends on no weights.

        They are equal, or of the same type: then they differ, and become slices of the loop.

        Args:
            ours: the value of the first chunk.
            theirs: the value of the other one.
            depth: the longest chain of equations to compare.
        """
        if isinstance(theirs, Var) and theirs in self._of_model:
            return False
        if isinstance(ours, Literal):
            return isinstance(theirs, Literal) and _is_same(ours, theirs)
        if ours in self.equal:
            return _is_same(self.equal[ours], theirs)
        if ours is theirs:
            self.equal[ours] = theirs
            return True
        known = self.num_known
        operands = self._operands(ours, theirs) if depth else None
        if operands is not None and all(
            self._is_given(mine, self._without_casts(other), depth - 1) for mine, other in operands
        ):
            self.equal[ours] = theirs
            return True
        self.forget_after(known)
        mine, other = aval_of(ours), aval_of(theirs)
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return False
        self.equal[ours] = self.differing[ours] = theirs
        return True

    def _operands(self, ours: Atom, theirs: Atom) -> list[tuple[Atom, Atom]] | None:
        """Return the pairs of operands that must be equal for two values to be; None if none do."""
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
        """Return the operand of the casts to its own dtype that a value is the result of."""
        while isinstance(atom, Var) and atom in self._maker and is_same_cast(self._maker[atom][0]):
            (atom,) = self._maker[atom][0].invars
        return atom


def are_alike(comparisons: Sequence[ChunkComparison], chunks: Sequence[Sequence[Atom]]) -> bool:
    """Return whether values of all chunks correspond, and add them to the comparisons if they do.

    Args:
        comparisons: the comparisons of the first chunk with each other one.
        chunks: the values of each chunk.
    """
    known = [comparison.num_known for comparison in comparisons]
    first, *others = chunks
    pairs = zip(comparisons, others, strict=True)
    if all(comparison.are_equal(first, other) for comparison, other in pairs):
        return True
    for comparison, num_known in zip(comparisons, known, strict=True):
        comparison.forget_after(num_known)
    return False


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
    return type(one) is type(other) and bool(np.all(comparable(one) == comparable(other)))


def _constants(jaxpr: Jaxpr) -> Iterable[Any]:
    """Yield the constants of a jaxpr and of all jaxprs in it."""
    yield from jaxpr.consts
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from _constants(inner)
