"""What a compiled program holds beside its arguments and results when it holds most, by what it is for, from its scheduled HLO.

Buffers live from the instruction that makes them to the last one that reads them. The compiler packs them tighter, or less tight, than
their sum: how much memory there is in all is for its buffer assignment to say, what it holds is said here.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from simulator.hlo.text import Array, Computation, Instruction, Module, read_module
from simulator.memory import Role, added

Pass = Literal["forward", "backward", "other"]
"""Where an instruction comes from: `jvp(...)` is forward, `transpose(jvp(...))` backward, all else the update."""

_SAME = frozenset(("bitcast", "opt-barrier", "add-dependency", "domain", "while", "get-tuple-element", "tuple"))
"""Opcodes whose results are their operands, or some of them."""

_COPIES = ("all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
"""Collectives that give copies of what other devices hold."""

_COMPLETING = ("all-reduce", "reduce-scatter")
"""Those that complete a value, which is what it was before."""


@dataclass(eq=False, slots=True)
class _Buffer:
    """Memory for one array, from the instruction number `first` to `last`.

    Attributes:
        makers, readers: the passes that write it and read it.
        elsewhere: whether it is an argument or a result of its computation, which somebody else counts.
    """

    num_bytes: float
    first: int
    last: int
    makers: set[Pass]
    copied: bool = False
    elsewhere: bool = False
    readers: set[Pass] = field(default_factory=set)

    @property
    def role(self) -> Role:
        if self.copied:
            return "communication"
        if "backward" in self.makers and "other" in self.readers:
            return "gradients"
        if "forward" in self.makers and "backward" in self.readers:
            return "activations"
        return "temporaries"


def held_at_peak(text: str) -> dict[Role, float]:
    """Bytes beside arguments and results, at the moment when they are most; `HloError` for text that is no module."""
    module = read_module(text)
    return _held(module, module.entry)


def _held(module: Module, computation: Computation) -> dict[Role, float]:
    buffers: list[_Buffer] = []
    inside: dict[int, dict[Role, float]] = {}
    values: dict[str, tuple[_Buffer, ...]] = {}
    completed: list[tuple[tuple[_Buffer, ...], list[tuple[_Buffer, ...]]]] = []
    for number, instruction in enumerate(computation.instructions):
        operands = [values[name] for name in instruction.operands]
        came_from = _pass_of(module, instruction) or _inherited(operands)
        result = _result(computation, instruction, operands)
        if result is None:
            made = [_Buffer(array.num_bytes, number, number, {came_from}) for array in instruction.shape]
            for each in made:
                each.copied = instruction.opcode.startswith(_COPIES)
                each.elsewhere = instruction.opcode in ("parameter", "constant")
            result = _in_place(instruction, operands, made)
            buffers += made
        if instruction.opcode not in _SAME or instruction.opcode == "while":
            for each in (buffer for operand in operands for buffer in operand):
                each.last = number
                each.readers.add(came_from)
        if instruction.opcode == "while":  # writes what it carries
            for each in result:
                each.makers.add(came_from)
        if instruction.opcode.startswith(_COMPLETING):
            completed.append((result, operands))
        inner = [_held(module, called) for called in _launched(module, instruction)]
        inside[number] = max(inner, key=lambda held: sum(held.values()), default={})
        values[instruction.name] = result
    for each in values[computation.root]:
        each.elsewhere = True
    for result, operands in reversed(completed):
        if any(each.role == "gradients" for each in result):
            for each in (buffer for operand in operands for buffer in operand):
                each.readers.add("other")
    return _fullest(buffers, inside, len(computation.instructions))


def _fullest(buffers: list[_Buffer], inside: Mapping[int, Mapping[Role, float]], moments: int) -> dict[Role, float]:
    changes: dict[int, list[tuple[Role, float]]] = defaultdict(list)
    for each in buffers:
        if not each.elsewhere and each.num_bytes:
            changes[each.first].append((each.role, each.num_bytes))
            changes[each.last + 1].append((each.role, -each.num_bytes))
    now: dict[Role, float] = defaultdict(float)
    most: dict[Role, float] = {}
    for moment in range(moments):
        for role, change in changes[moment]:
            now[role] += change
        held = added(now, inside[moment])
        if sum(held.values()) > sum(most.values()):
            most = held
    return {role: size for role, size in most.items() if size}


def _result(
    computation: Computation, instruction: Instruction, operands: list[tuple[_Buffer, ...]]
) -> tuple[_Buffer, ...] | None:
    """The buffers of an instruction that makes none of its own."""
    if instruction.opcode == "get-tuple-element":
        (source,) = computation.operands(instruction)
        index = int(re.search(r"\bindex=(\d+)", instruction.attributes)[1])  # pyright: ignore[reportOptionalSubscript]
        if len(source.shape) == len(operands[0]) > index and source.shape[index] == instruction.array:
            return (operands[0][index],)
        return _run(source.shape, operands[0], instruction.shape)
    if instruction.opcode.endswith("-done"):
        source = computation.operands(instruction)[0]
        return _run(source.shape, operands[0], instruction.shape)
    if instruction.opcode == "tuple":
        return tuple(buffer for operand in operands for buffer in operand)
    return operands[0] if instruction.opcode in _SAME else None


def _run(shapes: tuple[Array, ...], of: tuple[_Buffer, ...], wanted: tuple[Array, ...]) -> tuple[_Buffer, ...]:
    """The last buffers in a row that have the shapes wanted: of what a `...-start` gives, its result comes after its operands."""
    starts = [i for i in range(len(shapes) - len(wanted) + 1) if shapes[i : i + len(wanted)] == wanted]
    at = starts[-1] if starts else max(0, len(of) - len(wanted))
    return of[at : at + len(wanted)]


def _in_place(
    instruction: Instruction, operands: list[tuple[_Buffer, ...]], made: list[_Buffer]
) -> tuple[_Buffer, ...]:
    """The result, with the operands that it is written over, or that a `...-start` hands on, in place of buffers of its own."""
    result = list(made)
    for index, operand in re.findall(
        r"\{(\d*)\}: \((\d+), \{\}", _attribute(instruction, "output_to_operand_aliasing")
    ):
        result[int(index or 0)] = operands[int(operand)][0]
    flat = [buffer for operand in operands for buffer in operand]
    if instruction.opcode.endswith("-start") and len(made) > len(flat):
        result[: len(flat)] = flat
    for own, taken in zip(made, result, strict=True):
        if own is not taken:
            own.num_bytes = 0.0
            taken.makers |= own.makers
    return tuple(result)


def _attribute(instruction: Instruction, key: str) -> str:
    _, found, rest = instruction.attributes.partition(f"{key}={{")
    return rest.split(")}", 1)[0] + ")" if found else ""


def _pass_of(module: Module, instruction: Instruction) -> Pass | None:
    """The pass that an instruction is of; None if it has no name, as copies that the compiler adds. A loop is of what is in it."""
    if instruction.opcode == "while":
        passes = {_pass_of(module, each) for each in module.called(instruction, "body").instructions}
        if "backward" in passes:
            return "backward"
        if "forward" in passes:
            return "forward"
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return pass_of(found[1]) if found else None


def pass_of(name: str) -> Pass:
    """The pass that an operation is of, by the name that JAX gives it."""
    return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "other"


def _inherited(operands: list[tuple[_Buffer, ...]]) -> Pass:
    makers = {each for operand in operands for buffer in operand for each in buffer.makers}
    return "backward" if "backward" in makers else "forward" if "forward" in makers else "other"


def _launched(module: Module, instruction: Instruction) -> Iterator[Computation]:
    """The computations whose buffers live while the instruction runs; those of a fusion are registers."""
    match instruction.opcode:
        case "while":
            yield module.called(instruction, "body")
        case "call":
            yield module.called(instruction, "to_apply")
        case "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            keys = ("true_computation", "false_computation")
            branches = (
                [module.computations[name.strip().lstrip("%")] for name in names[1].split(",")]
                if names
                else [module.called(instruction, key) for key in keys]
            )
            yield from branches
