"""Liveness of buffers in scheduled HLO: a program's temporary memory over time, by role.

A buffer is live from the instruction that writes it first to the last one that reads it. The total
of peak memory comes from XLA's buffer assignment, which packs buffers; this module only divides it
among roles and instructions.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from simulator.array_type import Array
from simulator.hlo.op_list import branches
from simulator.hlo.provenance import instruction_pass
from simulator.hlo.text import Computation, Instruction, Module, errors_about, read_module
from simulator.live_ranges import LiveRange, Pass, fullest, levels_by_point, role_of_value
from simulator.memory import Role, sum_roles
from simulator.work import Collective, Done, Kernel, Loop, OpList, Start

_ALIASES = frozenset(
    ("bitcast", "opt-barrier", "add-dependency", "domain", "while", "get-tuple-element", "tuple")
)
"""Opcodes whose results are (some of) their operands."""

_COPIES = (
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Collectives whose results are copies of the arrays of other devices."""

_REDUCTIONS = ("all-reduce", "reduce-scatter")
"""Collectives that complete a value, which keeps its role."""


@dataclass(eq=False, slots=True)
class _Buffer:
    """Memory of one array.

    Attributes:
        num_bytes: size of the array.
        first: number of the instruction that writes it first.
        last: number of the instruction that reads it last.
        writers: the passes that write it.
        copied: whether it is a copy of arrays of other devices.
        external: whether it is an argument or a result of its computation, which is counted
            outside.
        readers: the passes that read it.
    """

    num_bytes: float
    first: int
    last: int
    writers: set[Pass]
    copied: bool = False
    external: bool = False
    readers: set[Pass] = field(default_factory=set)

    @property
    def role(self) -> Role:
        """Role, from the passes that write and read the buffer."""
        if self.copied:
            return "communication"
        return role_of_value(self.writers, self.readers)


type TemporaryMemory = Mapping[str, Mapping[Role, float]]
"""Bytes by role while an instruction runs, without arguments and results, by its name."""


def temporary_memory(text: str) -> TemporaryMemory:
    """Return the bytes by role while each instruction runs, without arguments and results.

    Args:
        text: the text of a module, as `compiled.as_text()` of JAX returns it.

    Returns:
        The bytes by the name of the instruction, in the order of the schedule. Instructions of
        loops, calls and branches are among them, with the bytes that are live around them. An
        instruction that launches a computation has the bytes at the peak of the computation.

    Raises:
        HloError: the text is no module.
    """
    module = read_module(text)
    return _temporary_memory(module, module.entry)


def op_temporaries(ops: OpList, memory: TemporaryMemory) -> list[Mapping[Role, float]]:
    """Return the bytes by role while each op of a module runs, without arguments and results.

    Args:
        ops: the ops of the module, as `parse_hlo` returns them.
        memory: its memory by instruction, as `temporary_memory` returns it.

    Returns:
        The bytes of each op; for a loop, the bytes of its fullest op.
    """
    levels: list[Mapping[Role, float]] = []
    level: Mapping[Role, float] = {}
    for op in ops:
        match op:
            case Kernel(name) | Start(Collective(name)):
                level = memory.get(name, level)
            case Loop(_, body):
                level = fullest(op_temporaries(body, memory)) or level
            case Done():
                pass
        levels.append(level)
    return levels


def _temporary_memory(module: Module, computation: Computation) -> TemporaryMemory:
    scan = _Scan(module, computation)
    for number, instruction in enumerate(computation.instructions):
        with errors_about(instruction):
            scan.visit(number, instruction)
    return scan.memory()


type _Values = list[tuple[_Buffer, ...]]
"""For each of several values, the buffers of its arrays."""


class _Scan:
    """Follows the buffers of one computation through its schedule.

    Attributes:
        _reductions: results and operands of collectives that complete a value.
        _inner: memory of the computation with the highest peak of those that an instruction
            launches, by its number.
    """

    def __init__(self, module: Module, computation: Computation) -> None:
        self._module = module
        self._computation = computation
        self._buffers: list[_Buffer] = []
        self._values: dict[str, tuple[_Buffer, ...]] = {}
        self._reductions: list[tuple[tuple[_Buffer, ...], _Values]] = []
        self._inner: dict[int, TemporaryMemory] = {}

    def visit(self, number: int, instruction: Instruction) -> None:
        """Follow the buffers through the next instruction of the schedule."""
        operands = [self._values[name] for name in instruction.operands]
        origin = instruction_pass(self._module, instruction) or _inherited(operands)
        result = _result(self._computation, instruction, operands)
        if result is None:
            result = self._new_buffers(number, instruction, operands, origin)
        if instruction.opcode not in _ALIASES or instruction.opcode == "while":
            for buffer in _flat(operands):
                buffer.last = number
                buffer.readers.add(origin)
        if instruction.opcode == "while":  # it writes the values that it carries
            for buffer in result:
                buffer.writers.add(origin)
        if instruction.opcode.startswith(_REDUCTIONS):
            self._reductions.append((result, operands))
        inner = [
            _temporary_memory(self._module, called)
            for called in _launched(self._module, instruction)
        ]
        self._inner[number] = max(inner, key=_peak, default={})
        self._values[instruction.name] = result

    def memory(self) -> TemporaryMemory:
        """Return the bytes by role and instruction, after the last instruction was visited."""
        for buffer in self._values[self._computation.root]:
            buffer.external = True
        for result, operands in reversed(self._reductions):
            if any(buffer.role == "gradients" for buffer in result):
                for buffer in _flat(operands):
                    buffer.readers.add("other")
        ranges = (
            LiveRange(buffer.first, buffer.last, buffer.num_bytes, buffer.role)
            for buffer in self._buffers
            if not buffer.external and buffer.num_bytes
        )
        levels = levels_by_point(ranges, len(self._computation.instructions))
        memory: dict[str, Mapping[Role, float]] = {}
        for number, (instruction, level) in enumerate(
            zip(self._computation.instructions, levels, strict=True)
        ):
            inner = {
                name: sum_roles(inner_level, level)
                for name, inner_level in self._inner[number].items()
            }
            memory[instruction.name] = fullest(inner.values()) or level
            memory.update(inner)
        return memory

    def _new_buffers(
        self, number: int, instruction: Instruction, operands: _Values, origin: Pass
    ) -> tuple[_Buffer, ...]:
        """Return the buffers of a result: new ones, or operands that it overwrites."""
        new = [
            _Buffer(0 if array.on_host else array.num_bytes, number, number, {origin})
            for array in instruction.shape
        ]
        for buffer in new:
            buffer.copied = instruction.opcode.startswith(_COPIES)
            buffer.external = instruction.opcode in ("parameter", "constant")
        self._buffers += new
        return _in_place(instruction, operands, new)


def _peak(memory: TemporaryMemory) -> float:
    return sum(fullest(memory.values()).values())


def _flat(values: _Values) -> list[_Buffer]:
    return [buffer for value in values for buffer in value]


def _result(
    computation: Computation, instruction: Instruction, operands: _Values
) -> tuple[_Buffer, ...] | None:
    """Return the buffers of an instruction that only aliases its operands; None for others."""
    if instruction.opcode == "get-tuple-element":
        source = computation.operands(instruction, least=1)[0]
        if (element := re.search(r"\bindex=(\d+)", instruction.attributes)) is None:
            raise instruction.error("does not say which element; expected e.g. index=0")
        index = int(element[1])
        if (
            len(source.shape) == len(operands[0]) > index
            and source.shape[index] == instruction.array
        ):
            return (operands[0][index],)
        return _last_run(source.shape, operands[0], instruction.shape)
    if instruction.opcode.endswith("-done"):
        source = computation.operands(instruction, least=1)[0]
        return _last_run(source.shape, operands[0], instruction.shape)
    if instruction.opcode == "tuple":
        return tuple(_flat(operands))
    return operands[0] if instruction.opcode in _ALIASES else None


def _last_run(
    shapes: tuple[Array, ...], buffers: tuple[_Buffer, ...], result: tuple[Array, ...]
) -> tuple[_Buffer, ...]:
    """Return the last consecutive buffers with the shapes of a result.

    A `...-start` returns its operands, and its result after them.
    """
    starts = [
        i for i in range(len(shapes) - len(result) + 1) if shapes[i : i + len(result)] == result
    ]
    start = starts[-1] if starts else max(0, len(buffers) - len(result))
    return buffers[start : start + len(result)]


def _in_place(
    instruction: Instruction, operands: _Values, new: list[_Buffer]
) -> tuple[_Buffer, ...]:
    """Return the buffers of a result, with operands in place of new buffers where these alias them.

    An operand is aliased where the result overwrites it, or where a `...-start` returns it.
    """
    result = list(new)
    for index, operand in re.findall(
        r"\{(\d*)\}: \((\d+), \{\}", _attribute(instruction, "output_to_operand_aliasing")
    ):
        result[int(index or 0)] = operands[int(operand)][0]
    flat = _flat(operands)
    if instruction.opcode.endswith("-start") and len(new) > len(flat):
        result[: len(flat)] = flat
    for buffer, aliased in zip(new, result, strict=True):
        if buffer is not aliased:
            buffer.num_bytes = 0.0
            aliased.writers |= buffer.writers
    return tuple(result)


def _attribute(instruction: Instruction, key: str) -> str:
    """Return the text of an attribute in braces; empty if the instruction does not have it."""
    _, key_found, rest = instruction.attributes.partition(f"{key}={{")
    return rest.split(")}", 1)[0] + ")" if key_found else ""


def _inherited(operands: _Values) -> Pass:
    """Return the pass of an instruction without a name, from those that write its operands."""
    writers = {origin for buffer in _flat(operands) for origin in buffer.writers}
    return "backward" if "backward" in writers else "forward" if "forward" in writers else "other"


def _launched(module: Module, instruction: Instruction) -> Iterator[Computation]:
    """Yield the computations whose buffers are live while an instruction runs.

    The values in a fusion are in registers.
    """
    match instruction.opcode:
        case "while":
            yield module.called(instruction, "body")
        case "call":
            yield module.called(instruction, "to_apply")
        case "conditional":
            yield from branches(module, instruction)
