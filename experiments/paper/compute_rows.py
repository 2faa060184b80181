"""Computes the rows of one part of a figure; started by `experiments.paper.paper_cell`.

python -m experiments.paper.compute_rows FIGURE PART SIZE FILE
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pandas as pd

from experiments.paper.figure_files import hash_of, hash_path
from experiments.paper.study import PaperFigure, Table, figure_named


def main(name: str, part: str, size: str, path: str) -> None:
    """Write the rows of a part.

    Args:
        name: name of the figure.
        part: name of the part.
        size: "full" or "smoke".
        path: the file.

    Raises:
        ValueError: the part has no rows.
    """
    figure = figure_named(name)
    with _shared_traces(figure):
        table = pd.DataFrame(figure.module.rows(part, size == "smoke"))
    if table.empty:
        raise ValueError(f"{name}, part {part}: no rows; expected at least one")
    table.insert(0, "part", part)
    write_part(table.assign(status="ok", reason=""), Path(path))


def _shared_traces(figure: PaperFigure) -> AbstractContextManager[None]:
    """Return a block in which the rows of a part that plan the same step share its trace."""
    if "autopar" not in figure.packages:
        return nullcontext()
    import autopar  # imports JAX, which other figures do without

    return autopar.shared_traces()


def write_part(table: Table, path: Path) -> None:
    """Write the rows of a part, and before them their hash, so that they never lack it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".computed")
    write_table(table, partial)
    hash_path(path).write_text(hash_of(partial.read_bytes()))
    os.replace(partial, path)


def write_table(table: Table, path: Path) -> None:
    """Write a table as CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    table.to_csv(partial, index=False, float_format="%.6g", lineterminator="\n")
    os.replace(partial, path)


def read_rows(path: str) -> Table:
    """Return the rows in a file; only empty values are missing, not e.g. a series named "NA"."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


if __name__ == "__main__":
    main(*sys.argv[1:])
