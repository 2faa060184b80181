"""Hoist reshardings above equations that only reverse a value or widen its dtype.

The value has fewer bytes there, and the reversed kernel of a convolution stays next to the
convolution, where XLA recognizes it.
"""

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import convert_element_type_p, rev_p

from autopar.ir.array_sizes import value_bytes
from autopar.ir.graph import aval_of


def passes_moves(eqn: JaxprEqn) -> bool:
    """Return whether the operand of `eqn` may be resharded instead of its result.

    It may if it has the same dims and no more bytes.
    """
    return eqn.primitive is rev_p or (
        eqn.primitive is convert_element_type_p and _size(eqn, 0) < _size(eqn, 1)
    )


def moved_bytes(eqn: JaxprEqn | None, var: Var) -> int:
    """Return the bytes of the whole array that is moved when `var` is resharded.

    Args:
        eqn: the equation that computes `var`; None for an input.
        var: the value.
    """
    moved = eqn.invars[0] if eqn is not None and passes_moves(eqn) else var
    return value_bytes(moved)


def _size(eqn: JaxprEqn, end: int) -> int:
    return aval_of((eqn.invars[0], eqn.outvars[0])[end]).dtype.itemsize
