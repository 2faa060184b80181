"""Tables of commands have a row as soon as it is computed, and an option only where it matters."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.growing_tables import table_options, with_error, written


@dataclass(frozen=True)
class Row:
    name: str
    ours: float
    because: str
    error = 0.25


def test_the_file_has_each_row_before_the_next_is_computed(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"

    def rows():
        yield Row("a", 1.0, "")
        assert path.read_text() == "name,ours,because\na,1.0,\n"
        yield Row("b", 2.0, "why")

    assert [row.name for row in written(rows(), path)] == ["a", "b"]
    assert path.read_text() == "name,ours,because\na,1.0,\nb,2.0,why\n"


def test_an_error_stands_before_the_last_column(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    list(written([Row("a", 1.0, "why")], path, with_error))
    assert path.read_text() == "name,ours,error,because\na,1.0,0.2500,why\n"


def test_only_tables_of_named_rows_have_a_pattern() -> None:
    named = table_options(None, "rows", only="names").parse_args(["--only", "a"])
    assert (named.only, named.output) == ("a", Path("results/tables/rows.csv"))
    with pytest.raises(SystemExit):
        table_options(None, "rows").parse_args(["--only", "a"])
