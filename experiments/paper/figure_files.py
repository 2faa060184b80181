"""The files of a figure, and their hashes, by which a file that was changed by hand is found.

The record of a figure, a JSON file beside its others, has the hash of each file as it was written,
and the hash of the code that computed the rows. The files that are made from all figures have such
a record, too, and the rows of a part have a file with their hash.
"""

import csv
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


TEXT = "paper"
"""Stem of the record of the files that are made from all figures."""

TEXT_FILES = "summary.csv", "numbers.json", "index.html", "paper.pdf"


def rows_code(figure: PaperFigure) -> str:
    """Return the hash of the code on which the rows of a figure depend."""
    return code_hash(*figure.packages, f"experiments/paper/figures/{figure.name}.py")


def paths_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a figure, or of `TEXT`, but for its record."""
    names = TEXT_FILES if name == TEXT else [f"{name}{suffix}" for suffix in SUFFIXES]
    return [folder / file for file in names]


def record_path(folder: Path, name: str) -> Path:
    """Return the file with the hashes of the files of a figure, or of `TEXT`."""
    return folder / f"{name}.json"


def write_record(folder: Path, name: str, code: str) -> None:
    """Write the hashes of the files of a figure, or of `TEXT`.

    Args:
        folder: the folder of the results.
        name: name of the figure, or `TEXT`.
        code: the hash of the code that computed its rows.
    """
    hashes = {path.name: hash_of(path.read_bytes()) for path in paths_of(folder, name)}
    record_path(folder, name).write_text(
        json.dumps({"code": code, "files": hashes}, indent=1) + "\n"
    )


def changed_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a figure, or of `TEXT`, that are not as they were written.

    Missing files don't count: Snakemake writes them again.
    """
    record = record_path(folder, name)
    existing = [path for path in paths_of(folder, name) if path.exists()]
    if not record.exists():
        return existing
    try:
        hashes = json.loads(record.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return [record]
    return [path for path in existing if hashes.get(path.name) != hash_of(path.read_bytes())]


def mark_changed(
    folder: Path, markers: Path, figures: Iterable[PaperFigure] = FIGURES, *, remove: bool = True
) -> list[Path]:
    """Make Snakemake write changed files, and rows of parts that failed, again.

    The marker of each figure, and of `TEXT`, is an input of its rule, and is written when a file
    has changed, so that the rule's outputs are older.

    Args:
        folder: the folder of the results.
        markers: the folder of the markers.
        figures: the figures.
        remove: whether rows of parts that are to be computed again are removed.

    Returns:
        The changed files.
    """
    markers.mkdir(parents=True, exist_ok=True)
    changed: list[Path] = []
    for name in (*(figure.name for figure in figures), TEXT):
        marker = markers / name
        parts = sorted((folder / "cells" / name).glob("*.csv"))
        files = [*filter(_part_changed, parts), *changed_files(folder, name)]
        again = [part for part in parts if part in files or _part_failed(part)]
        if files or again or not marker.exists():
            # Snakemake compares contents of small inputs, too.
            marker.write_text(f"{time.time_ns()}\n" if files or again else "")
        if remove:
            for part in again:
                part.unlink()
        changed += files
    return changed


def hash_path(part: Path) -> Path:
    """Return the file with the hash of the rows of a part."""
    return part.with_suffix(".sha256")


def _part_changed(path: Path) -> bool:
    """Return whether rows are not as they were written; rows without a hash are."""
    recorded = hash_path(path)
    return recorded.exists() and recorded.read_text() != hash_of(path.read_bytes())


def _part_failed(path: Path) -> bool:
    first_row = next(csv.DictReader(path.read_text().splitlines()), {})
    return first_row.get("status") == "failed"


def hash_of(content: bytes) -> str:
    """Return the hash of a file's content."""
    return sha256(content).hexdigest()[:16]
