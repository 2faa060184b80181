"""Kernels of equations: their kind and FLOP on one device, from the shapes of its shards."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import hlo_dtype
from autopar.ir.graph import aval_of
from simulator.work import Gemm, Kernel

type Shapes = Sequence[tuple[int, ...]]

type KernelRule = Callable[[JaxprEqn, Shapes, Shapes, float], Kernel]
"""Maps an equation to its kernel, given the shapes of the shards of its operands and results, and
the bytes that it moves."""

type FlopRule = Callable[[JaxprEqn, Shapes], float]
"""Maps an equation and the shapes of its operands' shards to its FLOP."""


def elements(_: JaxprEqn, operands: Shapes) -> float:
    """Return the number of elements of the largest operand, for one FLOP per element."""
    return float(max(map(prod, operands), default=0))


def memory_kernel(flops: FlopRule = elements) -> KernelRule:
    """Return the rule of a kernel that is neither a matrix product nor a convolution."""

    def rule(eqn: JaxprEqn, operands: Shapes, _: Shapes, moved_bytes: float) -> Kernel:
        dtype = hlo_dtype(aval_of(eqn.outvars[0]).dtype)
        return Kernel(eqn.primitive.name, "memory", flops(eqn, operands), moved_bytes, dtype)

    return rule


def contraction_kernel(
    kind: Literal["gemm", "conv"],
    flops: FlopRule,
    gemm: Callable[[JaxprEqn, Shapes], Gemm | None] | None = None,
) -> KernelRule:
    """Return the rule of a matrix product or convolution.

    The dtype of such a kernel is that of its first operand.
    """

    def rule(eqn: JaxprEqn, operands: Shapes, _: Shapes, moved_bytes: float) -> Kernel:
        dtype = hlo_dtype(aval_of(eqn.invars[0]).dtype)
        product = gemm(eqn, operands) if gemm else None
        return Kernel(eqn.primitive.name, kind, flops(eqn, operands), moved_bytes, dtype, product)

    return rule
