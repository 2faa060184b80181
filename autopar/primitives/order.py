"""Primitives that need all elements along a dim: sorts, cumulative sums, Fourier transforms."""

from math import log2, prod

from jax.extend.core import JaxprEqn

from autopar.primitives.equation_work import Shapes, elements, memory_kernel
from autopar.primitives.factors import OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import along, shape_of, whole_along


def _fft(eqn: JaxprEqn) -> OpFactors:
    rank = len(shape_of(eqn.invars[0]))
    return whole_along(eqn, range(rank - len(eqn.params["fft_lengths"]), rank))


def _fft_flops(eqn: JaxprEqn, operands: Shapes) -> float:
    """Return the FLOP of a radix-2 transform."""
    return 5 * elements(eqn, operands) * log2(max(2, prod(eqn.params["fft_lengths"])))


def _comparisons(eqn: JaxprEqn, operands: Shapes) -> float:
    """Return n log n for every n elements that are sorted together."""
    dim = eqn.params["dimension" if eqn.primitive.name == "sort" else "axis"]
    return elements(eqn, operands) * log2(max(2, operands[0][dim]))


RECORDS = {
    "approx_top_k": PrimitiveRecord(factors=along("reduction_dimension")),
    "cumlogsumexp": PrimitiveRecord(factors=along("axis")),
    "cummax": PrimitiveRecord(factors=along("axis"), algebra="homogeneous"),
    "cummin": PrimitiveRecord(factors=along("axis"), algebra="homogeneous"),
    "cumprod": PrimitiveRecord(factors=along("axis")),
    "cumsum": PrimitiveRecord(factors=along("axis"), algebra="linear"),
    "fft": PrimitiveRecord(
        factors=_fft,
        work=memory_kernel(_fft_flops),
        algebra="linear",
        runs_on_shards=True,
    ),
    "sort": PrimitiveRecord(
        factors=along("dimension"), work=memory_kernel(_comparisons), algebra="homogeneous"
    ),
    "top_k": PrimitiveRecord(
        factors=along("axis"),
        work=memory_kernel(_comparisons),
        algebra="homogeneous",
        runs_on_shards=True,
    ),
}
