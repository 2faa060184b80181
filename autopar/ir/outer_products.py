"""Products that sum over no dim, as elementwise products.

Attention multiplied by a mask of heads, `einsum("bhqk,h->bhqk", weights, mask)`, is a `dot_general`
in JAX. XLA computes no matrix product for it, but an elementwise one, which it fuses with others.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import dot_general_p

from autopar.ir.graph import aval_of


def is_outer_product(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a `dot_general` that sums over no dim."""
    return eqn.primitive is dot_general_p and not eqn.params["dimension_numbers"][0][0]


def elementwise_product(eqn: JaxprEqn) -> Jaxpr:
    """Return the jaxpr of an outer product, as an elementwise one.

    It multiplies in the order of dims of the operand that has more of them, and transposes the
    product. `einsum` often transposes it back, so that no transpose is needed.
    """
    _, batch = eqn.params["dimension_numbers"]
    result, operands = aval_of(eqn.outvars[0]), [aval_of(atom) for atom in eqn.invars]
    free = iter(range(len(batch[0]), result.ndim))
    dims: list[list[int]] = []  # for each operand, the dims of the result that its dims become
    for aval, of_batch in zip(operands, batch, strict=True):
        place = {dim: k for k, dim in enumerate(of_batch)}
        dims.append([place[dim] if dim in place else next(free) for dim in range(aval.ndim)])
    order = list(dict.fromkeys([*max(dims, key=len), *range(result.ndim)]))
    shape = [result.shape[dim] for dim in order]

    def placed(operand: jax.Array, dims: Sequence[int]) -> jax.Array:
        places = [order.index(dim) for dim in dims]
        ascending = sorted(range(operand.ndim), key=places.__getitem__)
        operand = operand.astype(result.dtype).transpose(ascending)
        return lax.broadcast_in_dim(operand, shape, sorted(places))

    def product(*operands: jax.Array) -> jax.Array:
        lhs, rhs = map(placed, operands, dims)
        return (lhs * rhs).transpose([order.index(dim) for dim in range(result.ndim)])

    return jax.make_jaxpr(product)(*operands)
