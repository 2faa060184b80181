"""Collects the results of cells into tables.

python -m experiments.scripts.write_tables TABLES PUBLISHED CELLS ...
"""

import sys
from pathlib import Path

from experiments.report.cell_table import cell_table, quickstart_table, rows_of
from simulator.files import read_yaml


def main(tables: str, published: str, *cells: str) -> None:
    """Write cells.csv, cells.parquet and quickstart.csv, and print what failed.

    Args:
        tables: the directory of the tables.
        published: the file of published numbers.
        cells: the directories of the results.
    """
    table = cell_table(map(Path, cells), read_yaml(published))
    comparison = quickstart_table(table)
    table.to_csv(Path(tables) / "cells.csv", index=False, lineterminator="\n")
    table.to_parquet(Path(tables) / "cells.parquet", index=False)
    comparison.to_csv(Path(tables) / "quickstart.csv", index=False, lineterminator="\n")
    if len(comparison):
        print(comparison.to_string(index=False))
    for row in rows_of(table):
        if row["status"] == "failed":
            where = "{source} {platform} {model}-{size} {mesh} {strategy}".format_map(row)
            print(f"FAILED {where}: {row['reason']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
