"""Rows of measured training steps: tables in CSV whose columns are the fields of `StepRow`.

A row states what its source states; an empty cell means that the source does not say. Each row is
validated on its own, so that a wrong cell refuses its row and no other.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from simulator.files import FileError, brief, read_text


class StepRowError(ValueError):
    """A row that can't be read, or that no scenario can express."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A measured training step, as its source describes it.

    Attributes:
        line: number of the row, from 1.
        model: name of the model; its family decides what the sizes leave open.
        gpu: name of the GPU.
        gpus: number of GPUs.
        layers: number of layers.
        hidden: width of the residual stream.
        heads: number of attention heads.
        vocab: size of the vocabulary.
        seq: tokens of a sequence.
        global_batch: sequences of a step on all GPUs.
        ffn: inner width of the MLP; 4 times `hidden` by default.
        kv_heads: heads of keys and values; `heads` by default.
        nodes: number of hosts.
        tp: degree of tensor parallelism.
        pp: degree of pipeline parallelism.
        vp: stages of each device (interleaving).
        cp: degree of context parallelism.
        dp: degree of data parallelism; `gpus` / (`tp` * `pp` * `cp`) by default.
        ep: degree of expert parallelism.
        micro_batch: sequences of a microbatch on one device.
        recompute: what the backward pass recomputes.
        zero: what is sharded over the data axis, 0 to 3; 3 is FSDP.
        precision: type of the matrix products.
        step_s: measured seconds of a step.
        tokens_per_s_per_gpu: measured tokens per second and GPU.
        tflops_per_gpu: measured model TFLOP per second and GPU.
        memory_gb: measured peak memory of a GPU, in 10^9 bytes.
        outcome: "ok", or a text with "OOM" for a step that ran out of memory.
        kernel: kernels of attention and norms.
        sequence_parallel: whether the tensor axis divides norms along the sequence.
        framework: the software.
        source: origin of the row.
        notes: further facts, some phrases of which `simulator.validation.step_notes` reads.
    """

    line: int
    model: str
    gpu: str
    gpus: int
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    seq: int | None = None
    global_batch: int | None = None
    ffn: int | None = None
    kv_heads: int | None = None
    nodes: int | None = None
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    dp: int | None = None
    ep: int = 1
    micro_batch: int | None = None
    recompute: str = ""
    zero: int | None = None
    precision: str = ""
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    memory_gb: float | None = None
    outcome: str = ""
    kernel: str = ""
    sequence_parallel: bool | None = None
    framework: str = ""
    source: str = ""
    notes: str = ""

    @property
    def name(self) -> str:
        """The row in tables: its model, GPUs, degrees and number."""
        degrees = {"tp": self.tp, "pp": self.pp, "vp": self.vp, "cp": self.cp, "ep": self.ep}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        micro = [] if self.micro_batch is None else [f"mb{self.micro_batch}"]
        return " ".join(
            [self.model, f"{self.gpus} {self.gpu}", self.precision, *parts, *micro, f"#{self.line}"]
        )

    @property
    def replicas(self) -> int:
        """Degree of data parallelism.

        Raises:
            StepRowError: the degrees don't divide the number of GPUs.
        """
        group = self.tp * self.pp * self.cp
        if self.gpus % group:
            raise StepRowError(
                f"column gpus: given {self.gpus}, expected a multiple of tp * pp * cp, which is"
                f" {group}"
            )
        if self.dp is not None and self.dp * group != self.gpus:
            raise StepRowError(
                f"column dp: given {self.dp}, expected gpus / (tp * pp * cp), which is"
                f" {self.gpus // group}"
            )
        return self.gpus // group

    def required(self, column: str) -> Any:
        """Return the value of a column that a prediction needs.

        Raises:
            StepRowError: the source does not say it.
        """
        value = getattr(self, column)
        if value is None:
            raise StepRowError(f"column {column}: empty; a prediction needs it")
        return value


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be read.

    Attributes:
        line: number of the row, from 1.
        why: the column, what was given and what was expected.
    """

    line: int
    why: str

    @property
    def name(self) -> str:
        """The row in tables."""
        return f"row {self.line}"


class StepTable(NamedTuple):
    """A table of steps.

    Attributes:
        rows: its rows.
        unread: its columns that are no columns of steps.
    """

    rows: list[StepRow | BadRow]
    unread: list[str]


COLUMNS = tuple(name for name in StepRow.__dataclass_fields__ if name != "line")
"""Columns of a table of steps."""

REQUIRED_COLUMNS = ("model", "gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq")
"""Columns that a table must have, though their cells may be empty."""

MEASURED = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "memory_gb", "outcome")
"""Columns of which a table must have one, as there is nothing to compare otherwise."""


def read_step_table(path: Path) -> StepTable:
    """Read a table of steps.

    Args:
        path: a CSV file with some columns of `COLUMNS`; others are not read.

    Raises:
        FileError: the file can't be read, lacks a column that it must have, has a column twice, or
            has no rows.
    """
    text = read_text(path, "a CSV file of training steps")
    try:
        rows = list(csv.DictReader(StringIO(text), strict=True))
    except csv.Error as error:
        raise FileError(f"{path}: is not CSV: {error}") from None
    columns = next(csv.reader(StringIO(text)), [])
    missing = [column for column in REQUIRED_COLUMNS if column not in columns]
    if missing or not any(column in columns for column in MEASURED):
        raise FileError(
            f"{path}: no column {missing[0] if missing else ' or '.join(MEASURED)}; given"
            f" {brief(columns)}, expected some of {', '.join(COLUMNS)}, with commas between"
        )
    for column in COLUMNS:
        if columns.count(column) > 1:
            raise FileError(
                f"{path}: column {column} is given {columns.count(column)} times; expected once"
            )
    if not rows:
        raise FileError(f"{path}: no rows below the header; expected a row for each step")
    unread = [column for column in columns if column not in COLUMNS]
    return StepTable([_row(line, cells) for line, cells in enumerate(rows, 1)], unread)


def _row(line: int, cells: Mapping[str | None, Any]) -> StepRow | BadRow:
    if None in cells or None in cells.values():
        return BadRow(line, _cell_count(cells))
    try:
        return StepRow(line, **dict(_values(cells)))
    except StepRowError as error:
        return BadRow(line, str(error))


def _cell_count(cells: Mapping[str | None, Any]) -> str:
    """Return an error for a row of more or fewer cells than the header, as `DictReader` returns it.

    Further cells are a list without a column, and missing ones are None.
    """
    further = cells.get(None, ())
    columns = [cell for column, cell in cells.items() if column is not None]
    given = sum(cell is not None for cell in columns) + len(further)
    return f"given {given} cells, expected {len(columns)}, as in the header"


def _values(cells: Mapping[str | None, str]) -> Iterator[tuple[str, Any]]:
    """Yield the columns that are not empty, with their values."""
    kinds = _kinds()
    for column in COLUMNS:
        text = cells.get(column, "").strip()
        if text:
            yield column, _value(column, text, kinds[column])
        elif column in ("model", "gpu", "gpus"):
            raise StepRowError(f"column {column}: empty; each row must have it")


def _value(column: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise StepRowError(f"column {column}: given {brief(text)}, expected True or False")
        return text.lower() == "true"
    least = 0 if column == "zero" else 1
    expected = {int: f"a whole number of at least {least}", float: "a number above 0"}[kind]
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    valid = isfinite(number) and (
        number > 0 if kind is float else number == int(number) and number >= least
    )
    if not valid or number > 1e15 or (column == "zero" and number > 3):
        expected = "0, 1, 2 or 3" if column == "zero" else expected
        raise StepRowError(f"column {column}: given {brief(text)}, expected {expected}")
    return kind(number)


@cache
def _kinds() -> dict[str, type]:
    """Return the type of the cells of each column."""
    hints = get_type_hints(StepRow)
    return {
        name: get_args(hint)[0] if isinstance(hint, UnionType) else hint
        for name, hint in hints.items()
        if name in COLUMNS
    }
