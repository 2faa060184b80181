"""Draws the table of cells.

python -m experiments.scripts.draw_figures TABLE FIGURE ...
"""

import sys
from pathlib import Path

import pandas as pd

from experiments.report.bar_charts import draw_cells, save_svg
from experiments.report.cell_table import rows_of


def main(table: str, *figures: str) -> None:
    """Draw a figure for each model on each platform.

    Args:
        table: cells.parquet.
        figures: the files to write, each `.../source/platform/model-size.svg`.
    """
    cells = rows_of(pd.read_parquet(table))
    for path in map(Path, figures):
        source, platform, name = path.parts[-3:]
        model, size = name.removesuffix(".svg").split("-", 1)
        place = (platform, model, size)
        rows = [row for row in cells if (row["platform"], row["model"], row["size"]) == place]
        save_svg(draw_cells(rows, source), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
