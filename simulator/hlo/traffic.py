"""Bytes that a kernel moves: what it reads of its operands, which may be less than all of them, and what it writes."""

from collections.abc import Mapping, Sequence

from simulator.hlo.text import Computation, Instruction

_RENAMES = ("bitcast", "reshape", "get-tuple-element")
_PICKS = ("slice", "dynamic-slice", "gather", "broadcast", "pad")
"""One element of the result needs (at most) one element of the first operand, wherever it lies."""

_LEAST: Mapping[str, int] = {"dynamic-update-slice": 2, "scatter": 3}
"""Operands of what updates an array: that, then what it is updated with, or where, and then with what."""


def fusion_bytes(fused: Computation) -> float:
    """Bytes read and written by a fusion that computes `fused`.

    Walks backwards from the result and asks how many elements each instruction must provide: a slice needs only what it returns,
    a reduction all of its operand. Nothing inside the fusion is stored. A buffer that is updated in place is neither read nor
    written outside of the update.
    """
    root = fused.by_name[fused.root]
    results = fused.operands(root) if root.opcode == "tuple" else (root,)
    written = 0.0
    wanted: dict[str, float] = {}  # elements, by name
    in_place: set[str] = set()
    for result in results:
        update = _update_in_place(fused, result)
        if update is None:
            wanted[result.name] = max(wanted.get(result.name, 0.0), _size(result))
            written += result.num_bytes
        else:
            in_place.add(update.name)
            wanted[update.name] = _size(update)
            written += _update_bytes(fused, update)
    read = 0.0
    for instruction in reversed(fused.instructions):
        amount = min(wanted.get(instruction.name, 0.0), _size(instruction))
        if not amount:
            continue
        if instruction.opcode == "parameter":
            read += amount * instruction.num_bytes / _size(instruction)
        operands = fused.operands(instruction, least=_LEAST.get(instruction.opcode, 0))
        for index, operand in enumerate(operands):
            needs = _needs(instruction, operands, index, amount, instruction.name in in_place)
            wanted[operand.name] = wanted.get(operand.name, 0.0) + needs
    return read + written


def kernel_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes read and written by an instruction that is a kernel of its own."""
    operands = computation.operands(instruction, least=_LEAST.get(instruction.opcode, 0))
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
    """Bytes read and written by a library call; scratch memory, which comes after its first result as a row of bytes, is not traffic."""
    results = [
        call.array,
        *(
            array
            for array in call.shape[1:]
            if array.dtype not in ("s8", "u8") or len(array.dims) != 1
        ),
    ]
    return sum(operand.num_bytes for operand in computation.operands(call)) + sum(
        array.num_bytes for array in results
    )


def _needs(
    user: Instruction, operands: Sequence[Instruction], index: int, amount: float, in_place: bool
) -> float:
    """Elements of operand `index` that `user` needs to provide `amount` elements."""
    size = _size(operands[index])
    match user.opcode:
        case opcode if opcode in _PICKS:
            return amount if index == 0 else size
        case "dynamic-update-slice" if index == 0:
            return 0 if in_place else max(amount - _size(operands[1]), 0)
        case "scatter" if index == 0:  # an in-place scatter that combines reads what it then writes
            return _size(operands[-1]) if in_place else amount
        case "dynamic-update-slice" | "scatter" | "dot" | "ragged-dot":
            return size
        case _:
            return size * amount / max(_size(user), 1)


def _update_in_place(fused: Computation, result: Instruction) -> Instruction | None:
    """The dynamic-update-slice or scatter that `result` is, if the buffer it updates is a parameter of the fusion."""
    update = _origin(fused, result)
    if update.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    return (
        update
        if _origin(fused, fused.operands(update, least=_LEAST[update.opcode])[0]).opcode
        == "parameter"
        else None
    )


def _origin(fused: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = fused.operands(instruction, least=1)[0]
    return instruction


def _update_bytes(computation: Computation, update: Instruction) -> float:
    operands = computation.operands(update)
    source = operands[1] if update.opcode == "dynamic-update-slice" else operands[-1]
    return _size(source) * update.array.item_bytes


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.shape)
