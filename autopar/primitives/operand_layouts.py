"""Layouts and sizes in which cuBLAS and cuDNN read operands; others cost a copy."""

from math import prod

from jax.extend.core import JaxprEqn

from autopar.ir.graph import aval_of
from autopar.primitives.registry import OperandLayout
from autopar.primitives.rule_helpers import shape_of

ORDER, PADDED, KERNEL, GRADIENT = "order", "padded", "kernel", "gradient"


def dot_layouts(eqn: JaxprEqn) -> list[OperandLayout | None]:
    """Return the layouts that a matrix product needs of its operands and leaves in its result.

    Batch dims lead, and sizes of half-precision dims are multiples of 8. A product by a vector is a
    reduction, which reads its operands as they are.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    free_sizes = [
        prod(size for d, size in enumerate(shape_of(atom)) if d not in (*of_sum, *of_batch))
        for atom, of_sum, of_batch in zip(eqn.invars, contracted, batched, strict=True)
    ]
    if 1 in free_sizes:
        return [None, None, None]
    wants: list[OperandLayout | None] = []
    for side, atom in enumerate(eqn.invars):
        aval = aval_of(atom)
        sizes = [free_sizes[side], prod(aval.shape[d] for d in contracted[side])]
        order = _product_order(aval.ndim, tuple(contracted[side]), tuple(batched[side]), side)
        if aval.dtype.itemsize == 2 and any(size % 8 for size in sizes):
            wants.append((PADDED, order))
        else:
            wants.append((ORDER, order) if order else None)
    return [*wants, None]


def conv_layouts(eqn: JaxprEqn) -> list[OperandLayout | None]:
    """Return the layouts that a convolution needs.

    Its kernel and the gradient of a kernel are transposed; uneven padding is materialized.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    if numbers.lhs_spec[0] != 0:  # sums over examples: the gradient of a kernel
        return [None, None, (GRADIENT, None)]
    uneven = (
        any(low != high for low, high in params["padding"]) and max(params["lhs_dilation"]) == 1
    )
    return [(PADDED, params["padding"]) if uneven else None, (KERNEL, None), None]


def _product_order(
    ndim: int, contracted: tuple[int, ...], batched: tuple[int, ...], side: int
) -> tuple[int, ...] | None:
    """Return the order of dims in which a product reads an operand; None: as it is."""
    free = tuple(d for d in range(ndim) if d not in (*contracted, *batched))
    for order in ((*batched, *free, *contracted), (*batched, *contracted, *free)):
        if sorted(batched) == list(range(len(batched))) and order[len(batched) :] == tuple(
            range(len(batched), ndim)
        ):
            return None
    return (*batched, *free, *contracted) if side == 0 else (*batched, *contracted, *free)
