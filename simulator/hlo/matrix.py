"""FLOP of matrix products and convolutions: HLO's own, and calls of cuBLAS and cuDNN."""

import math
import re

from simulator.array_type import Array
from simulator.hlo.text import Computation, Instruction
from simulator.hlo.traffic import call_bytes
from simulator.work import Gemm, Kernel

_CONTRACTED = ("lhs_contracting_dim", "rhs_contracting_dim")
_BATCHED = ("lhs_batch_dim", "rhs_batch_dim")


def is_gemm_call(target: str) -> bool:
    """Return whether a custom call is a product of cuBLAS, e.g. `__cublas$lt$matmul$f8`."""
    return target.startswith(("__cublas$gemm", "__cublas$lt$matmul"))


def is_grouped_call(target: str) -> bool:
    """Return whether a custom call is a grouped product of cuBLASLt, `__cublas$lt$groupedMatmul`.

    XLA:GPU compiles `ragged-dot` to it.
    """
    return target.startswith("__cublas$") and "grouped" in target


def is_conv_call(target: str) -> bool:
    """Return whether a custom call is a convolution of cuDNN."""
    return target.startswith("__cudnn$conv")


def gemm_call(computation: Computation, call: Instruction) -> Kernel:
    """Return the kernel of a cuBLAS call; a third operand is scaled by `beta`, or is a bias."""
    lhs, rhs = (operand.array for operand in computation.operands(call, least=2)[:2])
    dims = [_json_numbers(call, key + "ensions") for key in (*_CONTRACTED, *_BATCHED)]
    gemm = _gemm_of(call, lhs, rhs, *dims)
    return Kernel(call.name, "gemm", gemm.flops, call_bytes(computation, call), lhs.dtype, gemm)


def grouped_call(computation: Computation, call: Instruction) -> Kernel:
    """Return the kernel of a grouped product; the third operand is the sizes of its groups."""
    lhs, rhs = (operand.array for operand in computation.operands(call, least=3)[:2])
    dims = [_json_numbers(call, key + "ensions") for key in (*_CONTRACTED, *_BATCHED)]
    groups = _json_numbers(call, "rhs_group_dimensions")
    flops = _ragged_flops(call, lhs, rhs, dims, groups)
    return Kernel(call.name, "gemm", flops, call_bytes(computation, call), lhs.dtype)


def ragged_flops(computation: Computation, dot: Instruction) -> float:
    """Return the FLOP of HLO's own `ragged-dot`."""
    lhs, rhs = (operand.array for operand in computation.operands(dot, least=3)[:2])
    dims = [dot.numbers(key + "s") for key in (*_CONTRACTED, *_BATCHED)]
    return _ragged_flops(dot, lhs, rhs, dims, dot.numbers("rhs_group_dims"))


def _ragged_flops(
    product: Instruction,
    lhs: Array,
    rhs: Array,
    dims: list[tuple[int, ...]],
    groups: tuple[int, ...],
) -> float:
    """Return the FLOP of a grouped product: each row (or inner element) is of one group."""
    _, contracted, _, batch = dims
    _check_dims(product, rhs, (*contracted, *batch, *groups))
    shared = {*contracted, *batch, *groups}
    columns = math.prod(size for dim, size in enumerate(rhs.dims) if dim not in shared)
    return 2.0 * lhs.size * columns


def conv_call(computation: Computation, call: Instruction, target: str) -> Kernel:
    """Return the kernel of a cuDNN convolution, forward or backward.

    Every element of y takes (elements of w / features of y) multiply-adds.
    """
    operands = computation.operands(call, least=2)
    x, w, y = operands[0].array, operands[1].array, call.array
    if "BackwardInput" in target:  # (dy, w) -> dx
        x, y = y, x
    elif "BackwardFilter" in target:  # (x, dy) -> dw
        w, y = y, w
    return Kernel(
        call.name,
        "conv",
        conv_flops(call, w, y),
        call_bytes(computation, call),
        operands[0].array.dtype,
    )


def conv_flops(instruction: Instruction, w: Array, y: Array) -> float:
    """Return the FLOP of a convolution with filter `w` and result `y`; padding counts."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    if labels is None:
        raise instruction.error(
            "a convolution without dim_labels; expected e.g. dim_labels=bf01_oi01->bf01"
        )
    if len(labels[1]) != len(w.dims) or "o" not in labels[1] or not w.size:
        raise instruction.error(
            f"dim_labels call the filter's dims {labels[1]!r}; its shape is {w.dims}"
        )
    return 2.0 * w.real_products * y.size * w.size / w.dims[labels[1].index("o")]


def dot_of(computation: Computation, dot: Instruction) -> Gemm:
    """Return the sizes of HLO's own `dot`."""
    lhs, rhs = (operand.array for operand in computation.operands(dot, least=2)[:2])
    return _gemm_of(dot, lhs, rhs, *(dot.numbers(key + "s") for key in (*_CONTRACTED, *_BATCHED)))


def _gemm_of(
    product: Instruction,
    lhs: Array,
    rhs: Array,
    lhs_contracted: tuple[int, ...],
    rhs_contracted: tuple[int, ...],
    lhs_batch: tuple[int, ...],
    rhs_batch: tuple[int, ...],
) -> Gemm:
    """Return the sizes of a product from its operands and their contracted and batch dims.

    A product of complex numbers counts as four of real ones.
    """
    _check_dims(product, lhs, (*lhs_contracted, *lhs_batch))
    _check_dims(product, rhs, (*rhs_contracted, *rhs_batch))
    k = math.prod(lhs.dims[dim] for dim in lhs_contracted)
    batch = math.prod(lhs.dims[dim] for dim in lhs_batch)
    shared = {*rhs_contracted, *rhs_batch}
    n = math.prod(size for dim, size in enumerate(rhs.dims) if dim not in shared)
    return Gemm(lhs.size // max(k * batch, 1), n, k, lhs.real_products * batch)


def _check_dims(product: Instruction, array: Array, dims: tuple[int, ...]) -> None:
    if dims and max(dims) >= len(array.dims):
        raise product.error(
            f"contracts or batches dims {dims} of an operand of shape {array.dims}; they count "
            "from 0"
        )


def _json_numbers(call: Instruction, key: str) -> tuple[int, ...]:
    numbers = re.search(rf'"{key}": ?\[([^\]]*)\]', call.attributes)
    if numbers is None:
        raise call.error(
            f"no {key!r} in its backend_config; expected the gemm_backend_config that XLA:GPU "
            "writes"
        )
    return tuple(int(number) for number in re.findall(r"\d+", numbers[1]))
