"""Primitives that need all elements along a dim, in order: sorts, scans along a dim, Fourier transforms."""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import OpFactors
from autopar.primitives.rule_helpers import Rule, along, shape_of, whole_along


def _fft(eqn: JaxprEqn) -> OpFactors:
    rank = len(shape_of(eqn.invars[0]))
    return whole_along(eqn, range(rank - len(eqn.params["fft_lengths"]), rank))


RULES: dict[str, Rule] = {
    "approx_top_k": along("reduction_dimension"),
    "cumlogsumexp": along("axis"),
    "cummax": along("axis"),
    "cummin": along("axis"),
    "cumprod": along("axis"),
    "cumsum": along("axis"),
    "fft": _fft,
    "sort": along("dimension"),
    "top_k": along("axis"),
}
