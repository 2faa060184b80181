"""The trace of a step for one batch size, from its traces for two others.

JAX traces a batch of one example otherwise than larger ones: it leaves out sums over dims of size
one. A trace that is scaled down has the equations of the larger ones, so that what is planned for
these applies to it.
"""

import cmath
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, TypeGuard

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.ir.graph import Atom, aval_of, constant

_POWERS = (1, -1, 2, -2)
"""Powers of the batch size with which constants may scale."""


class NotAffineError(ValueError):
    """Traces have other equations, or sizes that are no affine functions of the batch size."""


def rescaled(
    jaxpr: Jaxpr, larger: Jaxpr, growth: Fraction, scale: Fraction, rounds: bool = False
) -> Jaxpr:
    """Return a trace for a batch that is larger by `scale`, or smaller if that is below one.

    Sizes are affine functions of the batch size, as after `x[2:]`. Equations that are out of range
    for the scaled size, such as `x[8:9]` of four examples, are scaled like others: their values do
    not exist, but what is computed for the whole batch has their place. A number among the operands
    is not changed if it is no affine function of the batch size, nor a power of it.

    Args:
        jaxpr: a flat jaxpr.
        larger: the jaxpr of the same function for a batch that is larger by `growth`.
        growth: above one.
        scale: the factor.
        rounds: whether sizes that are no whole numbers are rounded up, as those of groups of
            examples that are larger than the scaled batch. Such values do not exist either.

    Raises:
        NotAffineError: the traces have other equations, or a size in them is no affine function of
            the batch size, or would be negative.
    """
    return _Rescaling(growth, scale, rounds).of_jaxpr(jaxpr, larger)


class _Rescaling:
    """The change of the values in two traces; see `rescaled` for the arguments."""

    def __init__(self, growth: Fraction, scale: Fraction, rounds: bool = False) -> None:
        self._growth, self._scale, self._rounds = growth, scale, rounds

    def of_jaxpr(self, jaxpr: Jaxpr, larger: Jaxpr) -> Jaxpr:
        """Return a jaxpr with all sizes scaled."""
        twins: dict[Var, Var] = {}
        scaled: dict[Var, Var] = {}

        def make(var: Var, other: Var) -> Var:
            twins[var] = other
            scaled[var] = Var(self.of(aval_of(var), aval_of(other)))
            return scaled[var]

        def use(atom: Atom, other: Atom) -> Atom:
            if isinstance(atom, Literal) and isinstance(other, Literal):
                return self._of_literal(atom, other)
            if isinstance(atom, Literal) or twins[atom] is not other:
                raise NotAffineError
            return scaled[atom]

        def of_eqn(eqn: JaxprEqn, other: JaxprEqn) -> JaxprEqn:
            if eqn.primitive is not other.primitive:
                raise NotAffineError
            return eqn.replace(
                invars=_zipped(use, eqn.invars, other.invars),
                params=self.of(eqn.params, other.params),
                outvars=_zipped(make, eqn.outvars, other.outvars),
            )

        return jaxpr.replace(
            constvars=_zipped(make, jaxpr.constvars, larger.constvars),
            consts=_zipped(self._of_constant, jaxpr.consts, larger.consts),
            invars=_zipped(make, jaxpr.invars, larger.invars),
            eqns=_zipped(of_eqn, jaxpr.eqns, larger.eqns),
            outvars=_zipped(use, jaxpr.outvars, larger.outvars),
        )

    def _of_constant(self, value: Any, other: Any) -> Any:
        """Return an array of the trace, scaled if its elements are equal."""
        if _is_same_array(value, other):
            return value
        mine, their = constant(value), constant(other)
        if not all(array.size and (array == array.flat[0]).all() for array in (mine, their)):
            raise NotAffineError
        element = _Rescaling(self._growth, self._scale).of(mine.flat[0], their.flat[0])
        return np.full(self.of(mine.shape, their.shape), element, mine.dtype)

    def _of_literal(self, literal: Literal, other: Literal) -> Literal:
        """Return a number among the operands, scaled if it depends on the batch size."""
        try:
            value = _Rescaling(self._growth, self._scale).of(literal.val, other.val)
        except NotAffineError:
            value = literal.val
        return Literal(value, self.of(aval_of(literal), aval_of(other)))

    def of(self, value: Any, other: Any) -> Any:
        """Return a parameter, a shape or a constant, scaled."""
        match value, other:
            case Jaxpr(), Jaxpr():
                return self.of_jaxpr(value, other)
            case ShapedArray(), ShapedArray():
                shape = self.of(value.shape, other.shape)
                if any(size < 0 for size in shape):
                    raise NotAffineError
                return value if shape == value.shape else value.update(shape=shape)
            case Mapping(), Mapping() if value.keys() == other.keys():
                return {key: self.of(item, other[key]) for key, item in value.items()}
            case (tuple(), tuple()) | (list(), list()) if type(value) is type(other):
                items = _zipped(self.of, value, other)
                if all(new is old for new, old in zip(items, value, strict=True)):
                    return value
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if _is_equal(value, other):
            return value
        if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
            return np.asarray(self._of_number(value.item(), other.item()), value.dtype)[()]
        return self._of_number(value, other)

    def _of_number(self, value: Any, other: Any) -> int | float | complex:
        """Return a number that depends on the batch, scaled."""
        if _is_size(value) and _is_size(other):
            scaled = value + (other - value) * (self._scale - 1) / (self._growth - 1)
            if self._rounds or scaled.denominator == 1:
                return ceil(scaled)
        elif isinstance(value, float | complex) and isinstance(other, float | complex) and value:
            for power in _POWERS:
                if cmath.isclose(other / value, self._growth**power, rel_tol=1e-6):
                    return value * float(self._scale**power)
        raise NotAffineError


def _zipped[T, R](
    function: Callable[[T, T], R], values: Sequence[T], others: Sequence[T]
) -> list[R]:
    """Return a function of the pairs of two sequences of the same length."""
    if len(values) != len(others):
        raise NotAffineError
    return [function(*pair) for pair in zip(values, others, strict=True)]


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two parameters or constants are the same."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    return _is_same_array(value, other) if hasattr(value, "dtype") else bool(value == other)


def _is_same_array(value: Any, other: Any) -> bool:
    mine, their = constant(value), constant(other)
    is_alike = mine.dtype == their.dtype and mine.shape == their.shape
    return is_alike and mine.tobytes() == their.tobytes()
