"""Memory traffic of kernels: the bytes that a kernel reads of its operands and writes."""

from collections.abc import Mapping, Sequence

from simulator.hlo.text import Computation, Instruction

_ALIASES = ("bitcast", "reshape", "get-tuple-element")
_PICKS = ("slice", "dynamic-slice", "gather", "broadcast", "pad")
"""Opcodes for which an element of the result needs at most one element of the first operand."""

_NUM_OPERANDS: Mapping[str, int] = {"dynamic-update-slice": 2, "scatter": 3}
"""Number of operands of updates: the array and the update, or the array, indices and updates."""


def fusion_bytes(fused: Computation) -> float:
    """Return the bytes that a fusion reads and writes.

    The walk goes backwards from the result and sums the elements that each instruction must
    provide: a slice reads only the elements that it returns, a reduction all of its operand. Values
    inside the fusion are not stored. A buffer that is updated in place is neither read nor written
    outside of the update.

    Args:
        fused: the computation of the fusion.
    """
    root = fused.by_name[fused.root]
    results = fused.operands(root) if root.opcode == "tuple" else (root,)
    written = 0.0
    required: dict[str, float] = {}  # elements by name of the instruction
    in_place: set[str] = set()
    for result in results:
        update = _update_in_place(fused, result)
        if update is None:
            required[result.name] = max(required.get(result.name, 0.0), _size(result))
            written += result.num_bytes
        else:
            in_place.add(update.name)
            required[update.name] = _size(update)
            written += _update_bytes(fused, update)
    read = 0.0
    for instruction in reversed(fused.instructions):
        amount = min(required.get(instruction.name, 0.0), _size(instruction))
        if not amount:
            continue
        if instruction.opcode == "parameter":
            read += amount * instruction.num_bytes / _size(instruction)
        operands = fused.operands(instruction, least=_NUM_OPERANDS.get(instruction.opcode, 0))
        for index, operand in enumerate(operands):
            needs = _needs(instruction, operands, index, amount, instruction.name in in_place)
            required[operand.name] = required.get(operand.name, 0.0) + needs
    return read + written


def kernel_bytes(computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an instruction outside of fusions reads and writes."""
    operands = computation.operands(instruction, least=_NUM_OPERANDS.get(instruction.opcode, 0))
    updates = instruction.opcode in ("dynamic-update-slice", "scatter")
    written = _update_bytes(computation, instruction) if updates else instruction.num_bytes
    read = 0.0
    for index, operand in enumerate(operands):
        needs = min(
            _needs(instruction, operands, index, _size(instruction), updates), _size(operand)
        )
        read += needs * operand.num_bytes / max(_size(operand), 1)
    return read + written


def call_bytes(computation: Computation, call: Instruction) -> float:
    """Return the bytes that a library call reads and writes.

    A one-dimensional result of bytes after the first one is scratch memory, which is not traffic.
    """
    results = [
        array for array in call.shape[1:] if array.dtype not in ("s8", "u8") or len(array.dims) != 1
    ]
    read = sum(operand.num_bytes for operand in computation.operands(call))
    return read + sum(array.num_bytes for array in (call.array, *results))


def _needs(
    user: Instruction, operands: Sequence[Instruction], index: int, amount: float, in_place: bool
) -> float:
    """Return the elements of operand `index` that `user` reads to provide `amount` elements."""
    size = _size(operands[index])
    match user.opcode:
        case opcode if opcode in _PICKS:
            return amount if index == 0 else size
        case "dynamic-update-slice" if index == 0:
            return 0 if in_place else max(amount - _size(operands[1]), 0)
        case "scatter" if (
            index == 0
        ):  # in place, it reads the elements that it combines with updates
            return _size(operands[-1]) if in_place else amount
        case "dynamic-update-slice" | "scatter" | "dot" | "ragged-dot":
            return size
        case _:
            return size * amount / max(_size(user), 1)


def _update_in_place(fused: Computation, result: Instruction) -> Instruction | None:
    """Return the update that makes a result, if the updated array is a parameter of the fusion."""
    update = _origin(fused, result)
    if update.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    array = _origin(fused, fused.operands(update, least=_NUM_OPERANDS[update.opcode])[0])
    return update if array.opcode == "parameter" else None


def _origin(fused: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction that another one is an alias for."""
    while instruction.opcode in _ALIASES:
        instruction = fused.operands(instruction, least=1)[0]
    return instruction


def _update_bytes(computation: Computation, update: Instruction) -> float:
    """Return the bytes that an update writes."""
    operands = computation.operands(update)
    source = operands[1] if update.opcode == "dynamic-update-slice" else operands[-1]
    return _size(source) * update.array.item_bytes


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.shape)
