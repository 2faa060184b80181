"""Draw the table of cells: `python -m experiments.scripts.figures TABLE FIGURE ...`, each figure `source_platform_model-size.svg`."""

import sys
from pathlib import Path

import pandas as pd

from experiments.report.figures import draw_cells, save_svg


def main(table: str, *figures: str) -> None:
    cells = pd.read_parquet(table)
    for path in map(Path, figures):
        source, platform, name = path.stem.split("_")
        model, size = name.split("-", 1)
        of_model = cells[(cells["model"] == model) & (cells["size"] == size) & (cells["platform"] == platform)]
        save_svg(draw_cells(of_model, source), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
