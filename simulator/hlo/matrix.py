"""FLOP of matrix products and convolutions: HLO's own and the calls of cuBLAS and cuDNN that XLA:GPU makes of them."""

import math
import re

from simulator.hlo.text import Array, Computation, Instruction
from simulator.work import Gemm, Kernel

_CONTRACTED = ("lhs_contracting_dim", "rhs_contracting_dim")
_BATCHED = ("lhs_batch_dim", "rhs_batch_dim")


def is_gemm_call(target: str) -> bool:
    """Whether the custom call is one of cuBLAS: `__cublas$gemm`, `__cublas$lt$matmul`, `__cublas$lt$matmul$f8`."""
    return target.startswith("__cublas$") and "grouped" not in target


def is_conv_call(target: str) -> bool:
    """Whether the custom call is a convolution of cuDNN."""
    return target.startswith("__cudnn$conv")


def gemm_call(computation: Computation, call: Instruction) -> Kernel:
    """The kernel of a cuBLAS call: `beta` adds a third operand, an epilogue a bias; the last result is its workspace."""
    operands = computation.operands(call, least=2)
    lhs, rhs = operands[0].array, operands[1].array
    dims = [_json_numbers(call, key + "ensions") for key in (*_CONTRACTED, *_BATCHED)]
    gemm = _gemm_of(call, lhs, rhs, *dims)
    results = [call.shape[0], *(array for array in call.shape[1:] if not _is_workspace(array))]
    moved = sum(operand.num_bytes for operand in operands) + sum(array.num_bytes for array in results)
    return Kernel(call.name, "gemm", gemm.flops, moved, lhs.dtype, gemm)


def conv_call(computation: Computation, call: Instruction, target: str) -> Kernel:
    """The kernel of a cuDNN convolution, forward or backward: every element of y takes (elements of w / features of y) multiply-adds."""
    operands = computation.operands(call, least=2)
    x, w, y = operands[0].array, operands[1].array, call.shape[0]
    if "BackwardInput" in target:  # (dy, w) -> dx
        x, y = y, x
    elif "BackwardFilter" in target:  # (x, dy) -> dw
        w, y = y, w
    moved = sum(operand.num_bytes for operand in operands)
    moved += sum(array.num_bytes for array in call.shape if not _is_workspace(array))
    return Kernel(call.name, "conv", conv_flops(call, w, y), moved, operands[0].array.dtype)


def conv_flops(instruction: Instruction, w: Array, y: Array) -> float:
    """FLOP of a convolution with filter `w` and result `y`; padding counts."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    if labels is None:
        raise instruction.error("a convolution without dim_labels; expected e.g. dim_labels=bf01_oi01->bf01")
    if len(labels[1]) != len(w.dims) or "o" not in labels[1] or not w.size:
        raise instruction.error(f"dim_labels call the filter's dims {labels[1]!r}; its shape is {w.dims}")
    return 2.0 * y.size * w.size / w.dims[labels[1].index("o")]


def dot_of(computation: Computation, dot: Instruction) -> Gemm:
    """Sizes of HLO's own `dot`."""
    lhs, rhs = (operand.array for operand in computation.operands(dot, least=2)[:2])
    return _gemm_of(dot, lhs, rhs, *(dot.numbers(key + "s") for key in (*_CONTRACTED, *_BATCHED)))


def _gemm_of(
    product: Instruction,
    lhs: Array,
    rhs: Array,
    lhs_contracted: tuple[int, ...],
    rhs_contracted: tuple[int, ...],
    lhs_batch: tuple[int, ...] = (),
    rhs_batch: tuple[int, ...] = (),
) -> Gemm:
    """Sizes of a matrix product from the shapes of its operands and the dims that are summed over or kept apart."""
    for array, dims in ((lhs, (*lhs_contracted, *lhs_batch)), (rhs, (*rhs_contracted, *rhs_batch))):
        if dims and max(dims) >= len(array.dims):
            raise product.error(
                f"contracts or batches dims {dims} of an operand of shape {array.dims}; they count from 0"
            )
    k = math.prod(lhs.dims[dim] for dim in lhs_contracted)
    batch = math.prod(lhs.dims[dim] for dim in lhs_batch)
    taken = {*rhs_contracted, *rhs_batch}
    n = math.prod(size for dim, size in enumerate(rhs.dims) if dim not in taken)
    return Gemm(lhs.size // max(k * batch, 1), n, k, batch)


def _is_workspace(array: Array) -> bool:
    return array.dtype in ("s8", "u8") and len(array.dims) == 1


def _json_numbers(call: Instruction, key: str) -> tuple[int, ...]:
    found = re.search(rf'"{key}":\[([^\]]*)\]', call.attributes)
    if found is None:
        raise call.error(f"no {key!r} in its backend_config; expected the gemm_backend_config that XLA:GPU writes")
    return tuple(int(number) for number in re.findall(r"\d+", found[1]))
