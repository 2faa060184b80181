"""HLO text to computations of instructions; nothing is interpreted beyond names, shapes and operands.

Reads what `compiled.as_text()` of JAX 0.11 prints (grammar: openxla.org/xla, "HLO text", and xla/hlo/parser/hlo_parser.cc).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


class HloError(ValueError):
    """HLO that can't be read, or whose cost isn't known; shows the line."""


_BITS = {"pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "token": 0, "opaque": 0}
_BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (8, 16, 32, 64)}
_BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}


@dataclass(frozen=True, slots=True)
class Array:
    """Shape of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def item_bytes(self) -> float:
        """Bytes of an element."""
        bits = 8 if self.dtype.startswith("f8") else _BITS.get(self.dtype)
        if bits is None:
            raise HloError(f"unknown element type {self.dtype!r}; its size goes into simulator/hlo/text.py")
        return bits / 8

    @property
    def num_bytes(self) -> float:
        return self.size * self.item_bytes


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = shape opcode(operands), attributes`.

    Attributes:
        shape: the arrays of the result: one, or those of a tuple (flattened, when tuples are nested).
        arguments: the text in parentheses: operands, a parameter's number, a constant's value.
    """

    name: str
    shape: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    line: int

    @property
    def array(self) -> Array:
        """The shape of a result that is an array."""
        return self.shape[0]

    @property
    def num_bytes(self) -> float:
        return sum(array.num_bytes for array in self.shape)

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as `dimensions={0,2}`; empty if it isn't there."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()

    def error(self, problem: str) -> HloError:
        return HloError(f"HLO line {self.line}, %{self.name} = {self.opcode}(...): {problem}")


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled; `root` names the one that is the result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: str

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that compute the operands."""
        return tuple(self.by_name[name] for name in instruction.operands)


@dataclass(frozen=True)
class Module:
    """A whole HLO text."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int

    def called(self, instruction: Instruction, key: str) -> Computation:
        """The computation that attribute `key` of `instruction` names (calls, body, condition, to_apply, ...)."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.attributes)
        if found is None or found[1] not in self.computations:
            raise instruction.error(
                f"attribute {key}= names no computation of the text; expected the text of a whole module"
            )
        return self.computations[found[1]]


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_LINE = re.compile(r"(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"%([\w.\-]+)")


def read_module(text: str) -> Module:
    """Split HLO text into computations. Raises `HloError` when it isn't the text of a module with an entry computation."""
    header = text.split("\n", 1)[0]
    if not header.startswith("HloModule"):
        raise HloError(f"expected HLO text, which starts with 'HloModule', got {header[:80]!r}")
    computations: dict[str, Computation] = {}
    entry: str | None = None
    name, root, instructions = "", "", []
    for number, line in enumerate(text.splitlines(), start=1):
        if line[:1] == " ":
            if (instruction := _read_line(line.strip(), number)) is None:
                continue
            instructions.append(instruction)
            if line.lstrip().startswith("ROOT "):
                root = instruction.name
        elif line == "}":
            computations[name] = Computation(name, tuple(instructions), root or instructions[-1].name)
        elif found := _HEADER.match(line):
            name, root, instructions = found[2], "", []
            entry = name if found[1] else entry
    if entry is None:
        raise HloError(
            "no ENTRY computation in the HLO text; expected the text of a whole module, as compiled.as_text() gives"
        )
    counts = (re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count"))
    return Module(computations, computations[entry], math.prod(int(found[1]) for found in counts if found))


def _read_line(line: str, number: int) -> Instruction | None:
    found = _LINE.match(line)
    if found is None:
        if " = " in line:
            raise HloError(f"HLO line {number} is not understood: {line[:120]!r}")
        return None
    _, name, shape, opcode, rest = found.groups()
    end = _closing(rest)
    arguments = rest[:end]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(arguments))
    return Instruction(name, _read_shape(shape), opcode, operands, arguments, rest[end + 1 :], number)


def _read_shape(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(text)
    )


def _closing(text: str) -> int:
    """Where the parenthesis closes that was open before `text`."""
    depth = 1
    for found in _PARENTHESIS.finditer(text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)
