"""Linearity of equations: which operands may be summed or scaled after the equation instead."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from autopar.ir.graph import Atom, aval_of
from autopar.primitives.registry import Algebra, record_of


def algebra_of(eqn: JaxprEqn) -> Algebra | None:
    """Return how the result of an equation scales; None if it rounds to integers."""
    record = record_of(eqn)
    is_cast = record.movement == "cast" and not is_exact(eqn.invars[0])
    if (is_cast or record.algebra == "quotient") and is_exact(eqn.outvars[0]):
        return None
    return record.algebra


def adds(eqn: JaxprEqn) -> bool:
    """Return whether the data operands of an equation must scale alike, as in a sum."""
    return record_of(eqn).algebra in ("sum", "selection")


def data_operands(eqn: JaxprEqn) -> Sequence[int]:
    """Return the positions of the operands that are data, not indices or conditions."""
    return range(len(eqn.invars))[record_of(eqn).data]


def is_linear(eqn: JaxprEqn, operands: Sequence[int]) -> bool:
    """Return whether an equation is jointly linear in its operands at positions `operands`."""
    match algebra_of(eqn):
        case "product":
            return len(operands) == 1
        case "quotient":
            return list(operands) == [0]
        case "sum" | "linear" | "selection":
            return set(operands) <= set(data_operands(eqn))
    return False


def is_exact(atom: Atom) -> bool:
    """Return whether a value consists of integers or truth values."""
    return not jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)
