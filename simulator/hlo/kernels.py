"""Kernels: the FLOP and bytes of one HLO instruction."""

import re
from collections.abc import Mapping
from dataclasses import replace

from simulator.hlo.cudnn_calls import attention_call, is_attention_call
from simulator.hlo.matrix import (
    conv_call,
    conv_flops,
    dot_of,
    gemm_call,
    grouped_call,
    is_conv_call,
    is_gemm_call,
    is_grouped_call,
    ragged_flops,
)
from simulator.hlo.text import Computation, Instruction, Module
from simulator.hlo.traffic import call_bytes, fusion_bytes, kernel_bytes
from simulator.kernel_costs import KernelCost, has_cost, registered_kernel
from simulator.work import Kernel

_ELEMENTWISE = (
    "abs acos acosh add and asin asinh atan2 atanh bitcast-convert cbrt ceil clamp clz compare "
    "complex convert cosh cosine divide erf exponential exponential-minus-one floor imag "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real "
    "reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left "
    "shift-right-arithmetic shift-right-logical sign sine sinh sqrt stochastic-convert subtract "
    "tan tanh xor"
)
_DATA_MOVEMENT = (
    "broadcast concatenate copy dynamic-slice dynamic-update-slice fft gather iota map pad reduce "
    "reduce-window reshape reverse rng rng-bit-generator rng-get-and-update-state scatter "
    "select-and-scatter slice transpose"
)
_MEMORY = frozenset(f"{_ELEMENTWISE} {_DATA_MOVEMENT}".split())
_PRODUCTS = ("dot", "ragged-dot", "convolution")
KERNEL_TARGET = "autopar$kernel"
"""The target of calls that stand for kernels, with their name and cost in the backend_config."""

_MEMORY_CALLS = frozenset(("__gpu$TopK", "__cudnn$norm", "__cudnn$softmax"))


def kernel_of(module: Module, computation: Computation, instruction: Instruction) -> Kernel:
    """Return the kernel that an instruction launches.

    Args:
        module: the module.
        computation: the computation with the instruction.
        instruction: an instruction that launches one kernel.

    Returns:
        The kernel; its `unmodelled` names an instruction without a cost model.

    Raises:
        HloError: such an instruction has other operands or attributes.
    """
    match instruction.opcode:
        case "fusion" | "fusion-start":
            return _fusion(instruction, module.called(instruction, "calls"))
        case "custom-call":
            return _custom_call(computation, instruction)
        case opcode if opcode in _PRODUCTS:
            return _matrix(
                instruction.name, computation, [instruction], kernel_bytes(computation, instruction)
            )
        case "sort":
            return _memory(
                instruction,
                kernel_bytes(computation, instruction) * _passes(computation, instruction),
            )
        case "copy-start":  # its results are the copy, the source and a handle
            size = instruction.array.num_bytes
            if len({array.on_host for array in instruction.shape[:2]}) == 2:
                return Kernel(instruction.name, "host copy", 0.0, size)
            return _memory(instruction, 2 * size)
        case opcode if opcode in _MEMORY:
            return _memory(instruction, kernel_bytes(computation, instruction))
        case opcode:
            return _unmodelled(computation, instruction, opcode)


def _fusion(instruction: Instruction, fused: Computation) -> Kernel:
    """Return the kernel of a fusion."""
    for call in (inner for inner in fused.instructions if inner.opcode == "custom-call"):
        # slices that a library call reads or updates only offset its pointers
        return replace(_custom_call(fused, call), name=instruction.name)
    moved = fusion_bytes(fused)
    if products := [inner for inner in fused.instructions if inner.opcode in _PRODUCTS]:
        return _matrix(instruction.name, fused, products, moved)
    for sort in (inner for inner in fused.instructions if inner.opcode == "sort"):
        moved *= _passes(fused, sort)
    return _memory(instruction, moved)


def _custom_call(computation: Computation, call: Instruction) -> Kernel:
    """Return the kernel of a library call."""
    attribute = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    target = attribute[1] if attribute else ""
    described = call.backend_config() if target == KERNEL_TARGET else {}
    name = str(described.get("name", target))
    if has_cost(name):
        operands = [array for operand in computation.operands(call) for array in operand.shape]
        return registered_kernel(name, operands, call.shape, call.name)
    if "flops" in described:
        return _described_kernel(call, described)
    if is_gemm_call(target):
        return gemm_call(computation, call)
    if is_grouped_call(target):
        return grouped_call(computation, call)
    if is_conv_call(target):
        return conv_call(computation, call, target)
    if is_attention_call(target):
        return attention_call(computation, call, target)
    if target in _MEMORY_CALLS:
        return _memory(call, kernel_bytes(computation, call))
    return _unmodelled_call(computation, call, name)


def _unmodelled_call(computation: Computation, call: Instruction, name: str) -> Kernel:
    """Return a library call without a cost model, which moves its operands and results."""
    kernel = _memory(call, call_bytes(computation, call) if call.shape else 0.0)
    return replace(kernel, unmodelled=f"custom-call {name}")


def _described_kernel(call: Instruction, described: Mapping[str, object]) -> Kernel:
    """Return the kernel of a call of `KERNEL_TARGET` that states its own cost."""
    try:
        cost = KernelCost(described["flops"], described["bytes"], described["kind"])  # pyright: ignore[reportArgumentType]
    except (KeyError, TypeError, ValueError) as error:
        raise call.error(f"its backend_config states no cost: {error}") from None
    dtype = str(described.get("dtype", call.array.dtype))
    return Kernel(call.name, cost.kind, cost.flops, cost.bytes, dtype)


def _matrix(
    name: str, computation: Computation, products: list[Instruction], moved: float
) -> Kernel:
    """Return the kernel of HLO's own matrix products or convolutions, usually of one."""
    operands = [computation.operands(product, least=2) for product in products]
    gemms = [dot_of(computation, product) for product in products if product.opcode == "dot"]
    convs = [
        conv_flops(product, inputs[1].array, product.array)
        for product, inputs in zip(products, operands, strict=True)
        if product.opcode == "convolution"
    ]
    ragged = [
        ragged_flops(computation, product) for product in products if product.opcode == "ragged-dot"
    ]
    flops = sum(gemm.flops for gemm in gemms) + sum(convs) + sum(ragged)
    sizes = gemms[0] if len(products) == len(gemms) == 1 else None
    return Kernel(
        name, "gemm" if gemms or ragged else "conv", flops, moved, operands[0][0].array.dtype, sizes
    )


def _memory(instruction: Instruction, moved: float) -> Kernel:
    """Return a kernel that memory bounds."""
    dtype = instruction.array.dtype if instruction.shape else "f32"
    return Kernel(instruction.name, "memory", 0.0, moved, dtype)


def _unmodelled(computation: Computation, instruction: Instruction, kind: str) -> Kernel:
    """Return a kernel without a cost model, which at least moves its operands and results."""
    return replace(_memory(instruction, kernel_bytes(computation, instruction)), unmodelled=kind)


def _passes(computation: Computation, sort: Instruction) -> float:
    """Return the passes of a radix sort over its operands: one for each byte of the key."""
    return computation.operands(sort, least=1)[0].array.item_bytes
