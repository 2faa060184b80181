"""The work of one equation on one device, given the shapes of its shards."""

from collections.abc import Sequence
from math import log2, prod

from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.graph import aval_of
from simulator.work import Gemm, Kernel


def kernel_of(eqn: JaxprEqn, operands: Sequence[tuple[int, ...]], moved_bytes: float) -> Kernel:
    """`eqn` as one kernel.

    Args:
        operands: shapes of the shards it reads.
        moved_bytes: bytes it reads from and writes to device memory (less than its operands and results when fused).
    """
    name = eqn.primitive.name
    reads = aval_of(eqn.invars[0]) if eqn.invars else aval_of(eqn.outvars[0])
    match name:
        case "dot_general":
            gemm = _gemm(eqn.params["dimension_numbers"], operands[0], operands[1])
            return Kernel(name, "gemm", gemm.flops, moved_bytes, hlo_dtype(reads.dtype), gemm)
        case "ragged_dot_general":
            return Kernel(
                name, "gemm", _ragged_flops(eqn, *operands[:2]), moved_bytes, hlo_dtype(reads.dtype)
            )
        case "conv_general_dilated":
            return Kernel(
                name, "conv", _conv_flops(eqn, *operands), moved_bytes, hlo_dtype(reads.dtype)
            )
    return Kernel(
        name, "memory", _flops(eqn, operands), moved_bytes, hlo_dtype(aval_of(eqn.outvars[0]).dtype)
    )


_CUBIC = {
    "eig": 25,
    "eigh": 9,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "schur": 25,
    "svd": 22,
    "cholesky": 1 / 3,
    "triangular_solve": 1,
}
"""FLOP per n**3 of a square matrix, to the leading term (Golub and Van Loan, Matrix Computations, 4th edition)."""


def _flops(eqn: JaxprEqn, operands: Sequence[tuple[int, ...]]) -> float:
    """FLOP of what is neither a matrix product nor a convolution: one per element, if nothing else is known."""
    name = eqn.primitive.name
    elements = float(max(map(prod, operands), default=0))
    if name == "fft":  # the customary count of a radix-2 transform
        return 5 * elements * log2(max(2, prod(eqn.params["fft_lengths"])))
    if name in ("sort", "top_k"):
        along = operands[0][eqn.params["dimension" if name == "sort" else "axis"]]
        return elements * log2(max(2, along))
    if name in _CUBIC:
        return _CUBIC[name] * elements * operands[0][-1]
    if "window_dimensions" in eqn.params:  # overlapping windows read an element more than once
        windows = zip(eqn.params["window_dimensions"], eqn.params["window_strides"], strict=True)
        return elements * prod(max(1.0, size / stride) for size, stride in windows)
    return elements


def _conv_flops(eqn: JaxprEqn, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """Two per element of the result, of a kernel's window and of its channels in; zeros put in by lhs_dilation are free."""
    params = eqn.params
    numbers, batch_groups = params["dimension_numbers"], params["batch_group_count"]
    out = aval_of(eqn.outvars[0]).shape
    # A shard of several batch groups' examples is a shard of the groups: as many examples of each.
    examples = lhs[numbers.lhs_spec[0]] if batch_groups == 1 else out[numbers.out_spec[0]]
    space = prod(out[dim] for dim in numbers.out_spec[2:])
    return 2.0 * examples * space * prod(rhs) / prod(params["lhs_dilation"])


def _ragged_flops(eqn: JaxprEqn, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """As a product in which each row (or inner element) meets the one group that it belongs to."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contract, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * prod(lhs) * prod(size for dim, size in enumerate(rhs) if dim not in taken)


def _gemm(dimension_numbers: tuple, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Gemm:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

    def free(shape: tuple[int, ...], taken: Sequence[int]) -> int:
        return prod(size for dim, size in enumerate(shape) if dim not in taken)

    return Gemm(
        m=free(lhs, (*lhs_contract, *lhs_batch)),
        n=free(rhs, (*rhs_contract, *rhs_batch)),
        k=prod(lhs[dim] for dim in lhs_contract),
        batch=prod(lhs[dim] for dim in lhs_batch),
    )
