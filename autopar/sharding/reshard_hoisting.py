"""Hoist reshardings: a value changes its spec before equations that only reverse it or widen its type.

There it is as small as it gets, and a convolution finds the reversed kernel that it knows by.
"""

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import convert_element_type_p, rev_p

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of


def passes_moves(eqn: JaxprEqn) -> bool:
    """Whether the operand of `eqn` may as well be moved as its result: same dims, and not more bytes."""
    return eqn.primitive is rev_p or (
        eqn.primitive is convert_element_type_p and _size(eqn, 0) < _size(eqn, 1)
    )


def moved_bytes(eqn: JaxprEqn | None, var: Var) -> int:
    """Bytes of the whole of what is moved when `var`, made by `eqn` (None: an input), changes its spec."""
    moved = eqn.invars[0] if eqn is not None and passes_moves(eqn) else var
    return array_bytes(aval_of(moved).shape, aval_of(moved).dtype)


def _size(eqn: JaxprEqn, end: int) -> int:
    return aval_of((eqn.invars[0], eqn.outvars[0])[end]).dtype.itemsize
