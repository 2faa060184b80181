"""Draws the cells of a model on a platform.

python -m experiments.scripts.draw_figures FIGURE PUBLISHED CELLS ...
"""

import sys
from pathlib import Path

from experiments.cells import read_job
from experiments.report.bar_charts import draw_cells, save_svg
from experiments.report.cell_table import cell_table, rows_of
from experiments.sweep_progress import say
from simulator.files import read_yaml


def main(figure: str, published: str, *cells: str) -> None:
    """Draw step time and memory of every strategy of one model on one platform.

    Args:
        figure: the file to write.
        published: the file of published numbers.
        cells: the directories of the results, one for each mesh.
    """
    job = read_job(Path(cells[0]))
    rows = rows_of(cell_table(map(Path, cells), read_yaml(published)))
    shown = [row for row in rows if row["platform"] == job.platform]
    save_svg(draw_cells(shown, job.source), Path(figure))
    say(f"figure    {figure}")


if __name__ == "__main__":
    main(*sys.argv[1:])
