"""Padding: arrays of half precision that XLA stores larger, for matrix products.

cuBLAS multiplies half precision on tensor cores if the sizes of matrices are multiples of eight.
XLA writes operands with padding, and results have it, too.
"""

from collections.abc import Iterator, Mapping
from math import prod

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import dot_general_p

from autopar.ir.graph import Atom, aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph

_MULTIPLE = 8

type Groups = tuple[tuple[int, ...], ...]
"""Groups of dims of an array; the product of the sizes of each is one size of a matrix."""


@memoized_on_step
def padded_dims(step: StepGraph) -> Mapping[Var, Groups]:
    """Return the dims whose product is padded, for operands and results of matrix products."""
    found: dict[Var, Groups] = {}
    for eqn in step.jaxpr.eqns:
        if eqn.primitive is dot_general_p:
            for atom, groups in _matrices(eqn):
                if isinstance(atom, Var) and aval_of(atom).dtype.itemsize == 2:
                    found.setdefault(atom, groups)
    return found


def padding_factor(shape: tuple[int, ...], groups: Groups) -> float:
    """Return how many times more bytes an array has with its padding.

    Args:
        shape: its shape on one device.
        groups: see `padded_dims`.
    """
    sizes = (prod(shape[dim] for dim in dims) for dims in groups)
    return prod(-(-size // _MULTIPLE) * _MULTIPLE / size for size in sizes if size > 1)


def _matrices(eqn: JaxprEqn) -> Iterator[tuple[Atom, Groups]]:
    """Yield the operands and the result of a product with the dims of each side of the matrix."""
    contracted, batch = eqn.params["dimension_numbers"]
    num_free = []
    for atom, summed, kept in zip(eqn.invars, contracted, batch, strict=True):
        free = tuple(d for d in range(aval_of(atom).ndim) if d not in (*summed, *kept))
        num_free.append(len(free))
        yield atom, (free, tuple(summed))
    first = len(batch[0])
    middle, end = first + num_free[0], first + sum(num_free)
    yield eqn.outvars[0], (tuple(range(first, middle)), tuple(range(middle, end)))
