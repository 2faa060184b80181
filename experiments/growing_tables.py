"""Tables of commands that take minutes for each row: their options, and files that grow by rows."""

import argparse
import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any


def table_options(
    description: str | None, table: str, *, only: str = ""
) -> argparse.ArgumentParser:
    """Return a parser of the options of a command that writes a table.

    Args:
        description: the docstring of the command's module.
        table: the name of the table, the default of `--output`.
        only: what the pattern of `--only` matches; "" for a command without this option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if only:
        parser.add_argument("--only", default="", help=f"a pattern of {only}")
    parser.add_argument("--output", type=Path, default=Path(f"results/tables/{table}.csv"))
    return parser


def with_error(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with its property `error` before the last one."""
    values = asdict(row)
    last = next(reversed(values))
    text = values.pop(last)
    return {**values, "error": f"{row.error:.4f}", last: text}


def written[Row](
    rows: Iterable[Row], path: Path, columns: Callable[[Any], Mapping[str, Any]] = asdict
) -> Iterator[Row]:
    """Write rows to a CSV file, and yield each one as soon as the file has it.

    Args:
        rows: the rows, computed one by one.
        path: the file to replace.
        columns: returns the columns of a row; by default the fields of a dataclass.
    """
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            values = columns(row)
            if writer is None:
                writer = csv.DictWriter(file, list(values), lineterminator="\n")
                writer.writeheader()
            writer.writerow(values)
            file.flush()
            yield row
