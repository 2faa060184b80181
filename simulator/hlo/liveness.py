"""What a compiled program holds at peak memory beside its arguments and results, by role, from its scheduled HLO.

Buffers live from the instruction that makes them to the last one that reads them. The compiler packs them tighter, or less tight, than
their sum: how much memory there is in all is for its buffer assignment to say, what it holds is said here.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from simulator.hlo.op_list import branches
from simulator.hlo.provenance import Pass, instruction_pass
from simulator.hlo.text import Array, Computation, Instruction, Module, blamed, read_module
from simulator.memory import Role, sum_roles

_SAME = frozenset(
    ("bitcast", "opt-barrier", "add-dependency", "domain", "while", "get-tuple-element", "tuple")
)
"""Opcodes whose results are their operands, or some of them."""

_COPIES = (
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
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


def memory_roles_at_peak(text: str) -> dict[Role, float]:
    """Bytes beside arguments and results, at the moment when they are most; `HloError` for text that is no module."""
    module = read_module(text)
    return _held(module, module.entry)


def _held(module: Module, computation: Computation) -> dict[Role, float]:
    scan = _Scan(module, computation)
    for number, instruction in enumerate(computation.instructions):
        with blamed(instruction):
            scan.visit(number, instruction)
    return scan.fullest()


type _Values = list[tuple[_Buffer, ...]]
"""The buffers of several values, of each those of the arrays that it consists of."""


class _Scan:
    """Follows the buffers of one computation through its schedule."""

    def __init__(self, module: Module, computation: Computation) -> None:
        self._module, self._computation = module, computation
        self._buffers: list[_Buffer] = []
        self._values: dict[str, tuple[_Buffer, ...]] = {}
        self._completed: list[tuple[tuple[_Buffer, ...], _Values]] = []
        self._inside: dict[
            int, dict[Role, float]
        ] = {}  # what the computations hold that an instruction launches

    def visit(self, number: int, instruction: Instruction) -> None:
        """The next instruction of the schedule."""
        operands = [self._values[name] for name in instruction.operands]
        came_from = instruction_pass(self._module, instruction) or _inherited(operands)
        result = _result(self._computation, instruction, operands)
        if result is None:
            result = self._made(number, instruction, operands, came_from)
        if instruction.opcode not in _SAME or instruction.opcode == "while":
            for each in _flat(operands):
                each.last = number
                each.readers.add(came_from)
        if instruction.opcode == "while":  # writes what it carries
            for each in result:
                each.makers.add(came_from)
        if instruction.opcode.startswith(_COMPLETING):
            self._completed.append((result, operands))
        inner = [_held(self._module, called) for called in _launched(self._module, instruction)]
        self._inside[number] = max(inner, key=lambda held: sum(held.values()), default={})
        self._values[instruction.name] = result

    def fullest(self) -> dict[Role, float]:
        """What is held at the moment when that is most, once every instruction was visited."""
        for each in self._values[self._computation.root]:
            each.elsewhere = True
        for result, operands in reversed(self._completed):
            if any(each.role == "gradients" for each in result):
                for each in _flat(operands):
                    each.readers.add("other")
        return _fullest(self._buffers, self._inside, len(self._computation.instructions))

    def _made(
        self, number: int, instruction: Instruction, operands: _Values, came_from: Pass
    ) -> tuple[_Buffer, ...]:
        """New buffers for a result, but for what is written over an operand."""
        made = [
            _Buffer(array.num_bytes, number, number, {came_from}) for array in instruction.shape
        ]
        for each in made:
            each.copied = instruction.opcode.startswith(_COPIES)
            each.elsewhere = instruction.opcode in ("parameter", "constant")
        self._buffers += made
        return _in_place(instruction, operands, made)


def _flat(values: _Values) -> list[_Buffer]:
    return [buffer for value in values for buffer in value]


def _fullest(
    buffers: list[_Buffer], inside: Mapping[int, Mapping[Role, float]], moments: int
) -> dict[Role, float]:
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
        held = sum_roles(now, inside[moment])
        if sum(held.values()) > sum(most.values()):
            most = held
    return {role: size for role, size in most.items() if size}


def _result(
    computation: Computation, instruction: Instruction, operands: _Values
) -> tuple[_Buffer, ...] | None:
    """The buffers of an instruction that makes none of its own."""
    if instruction.opcode == "get-tuple-element":
        source = computation.operands(instruction, least=1)[0]
        if (found := re.search(r"\bindex=(\d+)", instruction.attributes)) is None:
            raise instruction.error("does not say which element; expected e.g. index=0")
        index = int(found[1])
        if (
            len(source.shape) == len(operands[0]) > index
            and source.shape[index] == instruction.array
        ):
            return (operands[0][index],)
        return _run(source.shape, operands[0], instruction.shape)
    if instruction.opcode.endswith("-done"):
        source = computation.operands(instruction, least=1)[0]
        return _run(source.shape, operands[0], instruction.shape)
    if instruction.opcode == "tuple":
        return tuple(_flat(operands))
    return operands[0] if instruction.opcode in _SAME else None


def _run(
    shapes: tuple[Array, ...], of: tuple[_Buffer, ...], wanted: tuple[Array, ...]
) -> tuple[_Buffer, ...]:
    """The last buffers in a row that have the shapes wanted: of what a `...-start` gives, its result comes after its operands."""
    starts = [
        i for i in range(len(shapes) - len(wanted) + 1) if shapes[i : i + len(wanted)] == wanted
    ]
    at = starts[-1] if starts else max(0, len(of) - len(wanted))
    return of[at : at + len(wanted)]


def _in_place(
    instruction: Instruction, operands: _Values, made: list[_Buffer]
) -> tuple[_Buffer, ...]:
    """The result, with the operands that it is written over, or that a `...-start` hands on, in place of buffers of its own."""
    result = list(made)
    for index, operand in re.findall(
        r"\{(\d*)\}: \((\d+), \{\}", _attribute(instruction, "output_to_operand_aliasing")
    ):
        result[int(index or 0)] = operands[int(operand)][0]
    flat = _flat(operands)
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


def _inherited(operands: _Values) -> Pass:
    makers = {each for buffer in _flat(operands) for each in buffer.makers}
    return "backward" if "backward" in makers else "forward" if "forward" in makers else "other"


def _launched(module: Module, instruction: Instruction) -> Iterator[Computation]:
    """The computations whose buffers live while the instruction runs; those of a fusion are registers."""
    match instruction.opcode:
        case "while":
            yield module.called(instruction, "body")
        case "call":
            yield module.called(instruction, "to_apply")
        case "conditional":
            yield from branches(module, instruction)
