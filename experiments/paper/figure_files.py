"""The files of a figure, and their hashes, by which a file that was changed by hand is found.

The record of a figure, a JSON file beside its others, has the hash of each file as it was written,
and the hash of the code that computed the rows.
"""

import json
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from experiments.paper.study import FIGURES, PaperFigure
from experiments.sources import code_hash

SUFFIXES = (".csv", ".txt", ".svg", ".pdf")
"""Rows, caption and drawings."""

TRACKED = (".csv", ".txt", ".svg")
"""What git tracks of a figure, beside its record; the PDF is drawn from the same rows."""


def rows_code(figure: PaperFigure) -> str:
    """Return the hash of the code on which the rows of a figure depend."""
    return code_hash(*figure.packages, f"experiments/paper/figures/{figure.name}.py")


def paths_of(folder: Path, figure: PaperFigure) -> list[Path]:
    """Return the files of a figure but for its record."""
    return [folder / f"{figure.name}{suffix}" for suffix in SUFFIXES]


def record_path(folder: Path, figure: PaperFigure) -> Path:
    """Return the file with the hashes of a figure's files."""
    return folder / f"{figure.name}.json"


def write_record(folder: Path, figure: PaperFigure, code: str) -> None:
    """Write the hashes of a figure's files.

    Args:
        folder: the folder of the results.
        figure: the figure.
        code: the hash of the code that computed its rows.
    """
    hashes = {path.name: _hash(path) for path in paths_of(folder, figure)}
    record_path(folder, figure).write_text(
        json.dumps({"code": code, "files": hashes}, indent=1) + "\n"
    )


def changed_files(folder: Path, figure: PaperFigure) -> list[Path]:
    """Return the files of a figure that are not as they were written; missing ones don't count."""
    record = record_path(folder, figure)
    existing = [path for path in paths_of(folder, figure) if path.exists()]
    if not record.exists():
        return existing
    try:
        hashes = json.loads(record.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return [record]
    return [path for path in existing if hashes.get(path.name) != _hash(path)]


def mark_changed(
    folder: Path, markers: Path, figures: Iterable[PaperFigure] = FIGURES
) -> list[Path]:
    """Make Snakemake write changed files again.

    The marker of each figure is an input of its rule, and is written when a file has changed, so
    that the rule's outputs are older.

    Args:
        folder: the folder of the results.
        markers: the folder of the markers.
        figures: the figures.

    Returns:
        The changed files.
    """
    markers.mkdir(parents=True, exist_ok=True)
    changed: list[Path] = []
    for figure in figures:
        marker = markers / figure.name
        files = changed_files(folder, figure)
        if files or not marker.exists():
            # Snakemake compares contents of small inputs, too.
            marker.write_text(f"{time.time_ns()}\n" if files else "")
        changed += files
    return changed


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:16]
