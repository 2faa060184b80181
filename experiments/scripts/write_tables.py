"""Collects the results of cells into tables.

python -m experiments.scripts.write_tables TABLES MEASURED PUBLISHED CELLS ...
"""

import sys
from pathlib import Path

from experiments.report.cell_table import cell_table, predicted_cells, quickstart_table, rows_of
from experiments.sweep_progress import say
from simulator.files import read_yaml


def main(tables: str, measured: str, published: str, *cells: str) -> None:
    """Write the tables of all cells, and print the comparison with published numbers.

    Args:
        tables: the directory of the tables that are the same on every machine: cells.csv and
            quickstart.csv.
        measured: the directory of the tables with measurements and times of this machine:
            cells.csv and cells.parquet.
        published: the file of published numbers.
        cells: the directories of the results.
    """
    table = cell_table(map(Path, cells), read_yaml(published))
    comparison = quickstart_table(table)
    predicted_cells(table).to_csv(Path(tables) / "cells.csv", index=False, lineterminator="\n")
    comparison.to_csv(Path(tables) / "quickstart.csv", index=False, lineterminator="\n")
    table.to_csv(Path(measured) / "cells.csv", index=False, lineterminator="\n")
    table.to_parquet(Path(measured) / "cells.parquet", index=False)
    for row in rows_of(comparison):
        say(
            "published  {model}-{size} {platform} {mesh} {strategy}: {published_step_time_ms} ms,"
            " predicted {predicted_step_time_ms} ms".format_map(row)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
