"""Equations whose results share the memory of an operand, and operands that are copied."""

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import conv_general_dilated_p, transpose_p

from autopar.ir.graph import aval_of
from autopar.primitives import record_of


def is_view(eqn: JaxprEqn) -> bool:
    """Return whether the result of `eqn` shares the memory of its first operand.

    A transposed matrix does: products read matrices in either order.
    """
    return record_of(eqn).is_view or (
        eqn.primitive is transpose_p and aval_of(eqn.outvars[0]).ndim == 2
    )


def is_relaid(eqn: JaxprEqn, operand: int) -> bool:
    """Return whether an equation reads a copy of the operand in another layout.

    This is the kernel of a convolution, unless it is pointwise.
    """
    if eqn.primitive is not conv_general_dilated_p or operand != 1:
        return False
    window = [
        aval_of(eqn.invars[1]).shape[dim] for dim in eqn.params["dimension_numbers"].rhs_spec[2:]
    ]
    return any(
        size > 1 for size in (*window, *eqn.params["window_strides"], *eqn.params["lhs_dilation"])
    )
