"""Draws a figure from the rows of its parts.

python -m experiments.paper.draw_figure FIGURE FOLDER CODE PARTS ...
"""

import sys
from pathlib import Path

import pandas as pd

from experiments.paper.compute_rows import read_rows, write_table
from experiments.paper.figure_files import write_record
from experiments.paper.paper_style import paper_style, save_figure
from experiments.paper.study import Table, figure_named


def main(name: str, folder: str, code: str, *parts: str) -> None:
    """Write the rows, the drawings and the caption of a figure.

    Args:
        name: name of the figure.
        folder: the folder of the results.
        code: the hash of the code that computed the rows.
        parts: the files of the rows.

    Raises:
        ValueError: all parts failed.
    """
    figure = figure_named(name)
    tables = list(map(read_rows, parts))
    table: Table = pd.concat(tables, ignore_index=True)
    # Failed parts are left out: their missing values would turn whole numbers into floats.
    ok = [one for one in tables if (one["status"] == "ok").all()]
    if not ok:
        raise ValueError(f"{name}: every part failed: {table['reason'].iloc[0]}")
    good: Table = pd.concat(ok, ignore_index=True)
    stem = Path(folder) / name
    write_table(table, stem.with_suffix(".csv"))
    with paper_style():
        save_figure(figure.module.draw(good), stem)
    stem.with_suffix(".txt").write_text(_caption(figure.module.caption(good), table) + "\n")
    write_record(Path(folder), name, code)


def _caption(text: str, table: Table) -> str:
    """Return a caption that names the parts without rows."""
    failed = sorted(table["part"][table["status"] != "ok"])
    return text + (f" Parts that failed: {', '.join(failed)}." if failed else "")


if __name__ == "__main__":
    main(*sys.argv[1:])
