"""Read HLO text into computations of instructions: names, shapes, operands and attributes.

The text is what `compiled.as_text()` returns in JAX 0.11 (grammar: openxla.org/xla, "HLO text", and
xla/hlo/parser/hlo_parser.cc).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simulator.array_type import ELEMENT_BITS, Array


class HloError(ValueError):
    """HLO that can't be read, or that has no known duration; the message shows the line."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}...")


_MAX_LENGTH = 1500
"""Characters of an error message."""


@dataclass(frozen=True)
class Instruction:
    """A line `%name = shape opcode(operands), attributes`.

    Attributes:
        name: name of the instruction.
        shape: arrays of the result: one, or those of a (flattened) tuple.
        opcode: operation, in HLO's spelling.
        operands: names of the operands.
        arguments: text in parentheses: operands, the number of a parameter, the value of a
            constant.
        attributes: text after the parentheses.
        line: number of the line.
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
        """The array of the result, the first one of a tuple; an `HloError` if there is none."""
        if not self.shape:
            raise self.error("its result has no array; expected one, such as f32[4]{0}")
        return self.shape[0]

    @property
    def num_bytes(self) -> float:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.shape)

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return the integers of an attribute such as `dimensions={0,2}`; none if it is absent."""
        attribute = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, re.findall(r"\d+", attribute[1]))) if attribute else ()

    def backend_config(self) -> Mapping[str, Any]:
        """Return the attribute `backend_config`.

        Raises:
            HloError: it is absent, or no JSON object.
        """
        _, _, text = self.attributes.partition("backend_config=")
        try:
            config, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise self.error(f"backend_config is {text[:40]!r}; expected a JSON object")
        return config

    def error(self, problem: str) -> HloError:
        """Return an error about the instruction."""
        return HloError(f"HLO line {self.line}, %{self.name} = {self.opcode}(...): {problem}")


@dataclass(frozen=True)
class Computation:
    """A computation.

    Attributes:
        name: name of the computation.
        instructions: instructions in the order of the schedule.
        root: name of the instruction that is the result.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: str

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operands(self, instruction: Instruction, least: int = 0) -> tuple[Instruction, ...]:
        """Return the instructions that compute the operands of an instruction.

        Raises:
            HloError: there are fewer than `least`.
        """
        if len(instruction.operands) < least:
            given = ", ".join(instruction.operands) or "none"
            raise instruction.error(f"its operands are {given}; expected {least} or more")
        return tuple(self.by_name[name] for name in instruction.operands)


@dataclass(frozen=True)
class Module:
    """A module.

    Attributes:
        computations: computations by name.
        entry: the computation that the program runs.
        num_devices: partitions times replicas.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int

    def called(self, instruction: Instruction, key: str) -> Computation:
        """Return the computation that an attribute names (calls, body, condition, ...).

        Raises:
            HloError: there is no such computation above the instruction.
        """
        attribute = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.attributes)
        return self.computation(instruction, key, attribute[1] if attribute else "")

    def computation(self, instruction: Instruction, key: str, name: str) -> Computation:
        """Return the computation of a name that attribute `key` of an instruction has.

        A computation comes before those that call it, so no call is recursive.

        Raises:
            HloError: there is no such computation above the instruction.
        """
        called = self.computations.get(name)
        if called is None or called.instructions[-1].line >= instruction.line:
            raise instruction.error(
                f"attribute {key}= names no computation above it, but {name!r}; expected the text "
                "of a whole module"
            )
        return called


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_LINE = re.compile(r"(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*S\(5\)\})?")
"""An array; XLA's memory space 5 is host memory."""

_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"%([\w.\-]+)")


def read_module(text: str) -> Module:
    """Return the module of an HLO text.

    Raises:
        HloError: the text is not that of a module with an entry computation.
    """
    header = text.split("\n", 1)[0]
    if not header.startswith("HloModule"):
        raise HloError(f"expected HLO text, which starts with 'HloModule', got {header[:80]!r}")
    computations: dict[str, Computation] = {}
    entry: str | None = None
    reading: _PartialComputation | None = None
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
            computations[reading.name] = reading.finish()
            reading = None
        elif header_line := _HEADER.match(line):
            if reading is not None:
                raise reading.error(
                    f"goes on where line {number} begins another one; expected a line '}}' before "
                    "that"
                )
            reading = _PartialComputation(header_line[2], number)
            if reading.name in computations:
                raise reading.error("was there before; expected a name of its own")
            entry = reading.name if header_line[1] else entry
    if reading is not None:
        raise reading.error("does not end; expected a line '}', the text seems to be cut off")
    if entry is None:
        raise HloError(
            "no ENTRY computation in the HLO text; expected the text of a whole module, as "
            "compiled.as_text() gives"
        )
    counts = (re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count"))
    return Module(
        computations, computations[entry], math.prod(int(count[1]) for count in counts if count)
    )


class _PartialComputation:
    """A computation while its lines are read."""

    def __init__(self, name: str, line: int) -> None:
        self.name = name
        self._line = line
        self._instructions: dict[str, Instruction] = {}
        self._root = ""

    def add(self, instruction: Instruction, is_root: bool) -> None:
        """Add the next instruction."""
        if instruction.name in self._instructions:
            raise instruction.error(
                f"line {self._instructions[instruction.name].line} has the same name"
            )
        for name in instruction.operands:
            if name not in self._instructions:
                raise instruction.error(
                    f"operand %{name} is nothing that %{self.name} computes above it; expected a "
                    "name from there"
                )
        self._instructions[instruction.name] = instruction
        if is_root:
            self._root = instruction.name

    def finish(self) -> Computation:
        """Return the computation after its last line."""
        if not self._instructions:
            raise self.error("has no instructions; expected one at least")
        instructions = tuple(self._instructions.values())
        return Computation(self.name, instructions, self._root or instructions[-1].name)

    def error(self, problem: str) -> HloError:
        """Return an error about the computation."""
        return HloError(f"HLO line {self._line}, computation %{self.name}: {problem}")


@contextmanager
def errors_about(instruction: Instruction) -> Iterator[None]:
    """Turn other errors inside the context into an `HloError` about an instruction."""
    try:
        yield
    except HloError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise instruction.error(
            f"its operands or attributes do not fit its kind ({type(error).__name__}: "
            f"{error}); expected what compiled.as_text() prints"
        ) from error


def _read_line(line: str, number: int) -> Instruction | None:
    """Return the instruction of a line; None for a line without one."""
    parts = _LINE.match(line)
    if parts is None:
        if " = " in line:
            raise HloError(f"HLO line {number} is not understood: {line[:120]!r}")
        return None
    _, name, shape, opcode, rest = parts.groups()
    end = _closing(rest)
    arguments = rest[:end]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(arguments))
    return Instruction(
        name, _read_shape(shape, number), opcode, operands, arguments, rest[end + 1 :], number
    )


def _read_shape(text: str, line: int) -> tuple[Array, ...]:
    """Return the arrays of a shape."""
    arrays = []
    for dtype, dims, on_host in _ARRAY.findall(text):
        if dtype not in ELEMENT_BITS and not dtype.startswith("f8"):
            raise HloError(
                f"HLO line {line}: unknown element type {dtype!r}; its size goes into "
                "simulator/array_type.py"
            )
        sizes = [dim.removeprefix("<=") for dim in dims.split(",") if dim]
        if not all(map(str.isdecimal, sizes)):
            raise HloError(
                f"HLO line {line}: shape {dtype}[{dims}] is not understood; expected e.g. f32[2,3] "
                "or f32[<=2]"
            )
        arrays.append(Array(dtype, tuple(map(int, sizes)), bool(on_host)))
    return tuple(arrays)


def _closing(text: str) -> int:
    """Return the position of the parenthesis that closes the one before `text`."""
    depth = 1
    for parenthesis in _PARENTHESIS.finditer(text):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return len(text)
