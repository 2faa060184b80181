"""Writes the report of the sweep: a page of its tables and figures, and a page for each cell.

python -m experiments.scripts.write_report RESULTS CELLS ...
"""

import sys
from pathlib import Path

import pandas as pd

from autopar.report import PageTable, table_page
from experiments.report.cell_pages import page_path, write_cell_pages
from experiments.report.cell_table import rows_of
from simulator.files import read_table, write_text

_CELLS = "cells.csv"


def main(results: str, *cells: str) -> None:
    """Write results/report.

    Args:
        results: the folder of the results.
        cells: the directories of the results of jobs.
    """
    root = Path(results)
    folder = root / "report"
    folder.mkdir(parents=True, exist_ok=True)
    pages = write_cell_pages(map(Path, cells), folder)
    tables = [_table(path, root, pages) for path in _files(root, "csv")]
    figures = {_title(path, root): path.read_text() for path in _files(root, "svg")}
    summary = f"Tables: {len(tables)}, figures: {len(figures)}, cells with a report: {len(pages)}."
    page = table_page("Results of the sweep", tables, figures, summary=summary)
    write_text(folder / "index.html", page)


def _files(root: Path, ending: str) -> list[Path]:
    """Return the files of an ending below a folder, the table of cells first."""
    own = root / "report"
    files = [path for path in root.rglob(f"*.{ending}") if own not in path.parents]
    return sorted(files, key=lambda path: (path.name != _CELLS, path))


def _title(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def _table(path: Path, root: Path, pages: set[Path]) -> PageTable:
    """Return a table, with links to the pages of cells if it is a table of them."""
    frame: pd.DataFrame = read_table(path)
    rows = rows_of(frame)
    links: list[str | None] = []
    if path.name == _CELLS:
        own = map(page_path, rows)
        links = [page.as_posix() if page in pages else None for page in own]
    columns = list(map(str, frame.columns))
    values = [[_plain(row[column]) for column in columns] for row in rows]
    return PageTable(_title(path, root), columns, values, links)


def _plain(value: object) -> object:
    """Return a number of NumPy as one of Python."""
    return value.item() if hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    main(*sys.argv[1:])
