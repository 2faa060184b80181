"""The work of one equation on one device, given the shapes of its shards."""

from collections.abc import Sequence
from math import prod

import numpy as np
from jax.extend.core import JaxprEqn

from autopar.graph import aval_of
from simulator.work import Gemm, Kernel

_HLO_DTYPE = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


def hlo_dtype(dtype: np.dtype) -> str:
    """HLO's spelling: float32 is f32, bool is pred."""
    name = np.dtype(dtype).name
    if name == "bool":
        return "pred"
    letters = name.rstrip("0123456789")
    return _HLO_DTYPE.get(letters, letters) + name[len(letters) :]


def array_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Bytes of an array, sub-byte types rounded up to one."""
    return prod(shape) * np.dtype(dtype).itemsize


def kernel_of(eqn: JaxprEqn, operands: Sequence[tuple[int, ...]], moved_bytes: float) -> Kernel:
    """`eqn` as one kernel.

    Args:
        operands: shapes of the shards it reads.
        moved_bytes: bytes it reads from and writes to device memory (less than its operands and results when fused).
    """
    name = eqn.primitive.name
    if name == "dot_general":
        dtype = hlo_dtype(aval_of(eqn.invars[0]).dtype)
        gemm = _gemm(eqn.params["dimension_numbers"], operands[0], operands[1])
        return Kernel(name, "gemm", gemm.flops, moved_bytes, dtype, gemm)
    dtype = hlo_dtype(aval_of(eqn.outvars[0]).dtype)
    return Kernel(name, "memory", float(max(map(prod, operands), default=0)), moved_bytes, dtype)


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
