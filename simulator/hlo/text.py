"""HLO text to computations of instructions; nothing is interpreted beyond names, shapes and operands.

Reads what `compiled.as_text()` of JAX 0.11 prints (grammar: openxla.org/xla, "HLO text", and xla/hlo/parser/hlo_parser.cc).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any


class HloError(ValueError):
    """HLO that can't be read, or whose cost isn't known; shows the line, cut off where it is long."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


_LONGEST = 1500
"""Characters of an error that are shown."""

_BITS = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "token": 0,
    "opaque": 0,
}
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
        return (8 if self.dtype.startswith("f8") else _BITS[self.dtype]) / 8

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
        if not self.shape:
            raise self.error("its result has no array; expected one, such as f32[4]{0}")
        return self.shape[0]

    @property
    def num_bytes(self) -> float:
        return sum(array.num_bytes for array in self.shape)

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as `dimensions={0,2}`; empty if it isn't there."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()

    def backend_config(self) -> Mapping[str, Any]:
        """What the compiler passes to the backend; `HloError` if there is nothing like that."""
        _, _, text = self.attributes.partition("backend_config=")
        try:
            config, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise self.error(f"backend_config is {text[:40]!r}; expected a JSON object")
        return config

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

    def operands(self, instruction: Instruction, least: int = 0) -> tuple[Instruction, ...]:
        """The instructions that compute the operands; `HloError` if there are fewer than `least`."""
        if len(instruction.operands) < least:
            given = ", ".join(instruction.operands) or "none"
            raise instruction.error(f"its operands are {given}; expected {least} or more")
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
        return self.computation(instruction, key, found[1] if found else "")

    def computation(self, instruction: Instruction, key: str, name: str) -> Computation:
        """The computation of that name, which `instruction` calls; those that are called come before those that call them."""
        called = self.computations.get(name)
        if called is None or called.instructions[-1].line >= instruction.line:
            raise instruction.error(
                f"attribute {key}= names no computation above it, but {name!r}; expected the text of a whole module"
            )
        return called


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
    reading: _Reading | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line[:1] == " ":
            if (instruction := _read_line(line.strip(), number)) is None:
                continue
            if reading is None:
                raise instruction.error(
                    "is in no computation; expected a line such as 'ENTRY %main {' before it"
                )
            reading.add(instruction, is_root=line.lstrip().startswith("ROOT "))
        elif line == "}" and reading is not None:
            computations[reading.name], reading = reading.finished(), None
        elif found := _HEADER.match(line):
            if reading is not None:
                raise reading.error(
                    f"goes on where line {number} begins another one; expected a line '}}' before that"
                )
            reading = _Reading(found[2], number)
            if reading.name in computations:
                raise reading.error("was there before; expected a name of its own")
            entry = reading.name if found[1] else entry
    if reading is not None:
        raise reading.error("does not end; expected a line '}', the text seems to be cut off")
    if entry is None:
        raise HloError(
            "no ENTRY computation in the HLO text; expected the text of a whole module, as compiled.as_text() gives"
        )
    counts = (re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count"))
    return Module(
        computations, computations[entry], math.prod(int(found[1]) for found in counts if found)
    )


class _Reading:
    """A computation of which some lines were read."""

    def __init__(self, name: str, line: int) -> None:
        self.name, self._line = name, line
        self._instructions: dict[str, Instruction] = {}
        self._root = ""

    def add(self, instruction: Instruction, is_root: bool) -> None:
        if instruction.name in self._instructions:
            raise instruction.error(
                f"line {self._instructions[instruction.name].line} has the same name"
            )
        for name in instruction.operands:
            if name not in self._instructions:
                raise instruction.error(
                    f"operand %{name} is nothing that %{self.name} computes above it; expected a name from there"
                )
        self._instructions[instruction.name] = instruction
        if is_root:
            self._root = instruction.name

    def finished(self) -> Computation:
        if not self._instructions:
            raise self.error("has no instructions; expected one at least")
        instructions = tuple(self._instructions.values())
        return Computation(self.name, instructions, self._root or instructions[-1].name)

    def error(self, problem: str) -> HloError:
        return HloError(f"HLO line {self._line}, computation %{self.name}: {problem}")


@contextmanager
def blamed(instruction: Instruction) -> Iterator[None]:
    """What goes wrong inside and is no `HloError` yet is said of `instruction`."""
    try:
        yield
    except HloError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise instruction.error(
            f"its operands or attributes are not those of its kind ({type(error).__name__}: {error}); expected what"
            " compiled.as_text() prints"
        ) from error


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
    return Instruction(
        name, _read_shape(shape, number), opcode, operands, arguments, rest[end + 1 :], number
    )


def _read_shape(text: str, line: int) -> tuple[Array, ...]:
    arrays = []
    for dtype, dims in _ARRAY.findall(text):
        if dtype not in _BITS and not dtype.startswith("f8"):
            raise HloError(
                f"HLO line {line}: unknown element type {dtype!r}; its size goes into simulator/hlo/text.py"
            )
        sizes = [dim.removeprefix("<=") for dim in dims.split(",") if dim]
        if not all(map(str.isdecimal, sizes)):
            raise HloError(
                f"HLO line {line}: shape {dtype}[{dims}] is not understood; expected e.g. f32[2,3] or f32[<=2]"
            )
        arrays.append(Array(dtype, tuple(map(int, sizes))))
    return tuple(arrays)


def _closing(text: str) -> int:
    """Where the parenthesis closes that was open before `text`."""
    depth = 1
    for found in _PARENTHESIS.finditer(text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)
