"""The tables of the documentation are those of the results and of the code."""

import re

import pandas as pd
import pytest

from autopar.primitives import FAMILIES
from docs.hooks import ROOT, on_page_markdown, reach_methods, reach_models, reach_refusals
from simulator import BACKENDS
from simulator.hardware.schema import SCHEMAS


def rows(marker: str) -> list[list[str]]:
    """Return the cells of the table that a marker makes, without the line below its header."""
    lines = on_page_markdown(f"before\n\n{marker}\n\nafter").splitlines()[2:-2]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [cells[0], *cells[2:]]


def test_a_table_has_the_columns_and_rows_of_its_file(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,seconds,note\na,0.123456,x|y\nb,2,\n")
    assert rows(f"{{{{ table {path} }}}}") == [
        ["name", "seconds", "note"],
        ["a", "0.1235", "x\\|y"],
        ["b", "2", ""],
    ]
    selected = rows(f"{{{{ table {path} | columns: seconds, name | where: seconds > 1 }}}}")
    assert selected == [["seconds", "name"], ["2", "b"]]
    with pytest.raises(ValueError, match=r"no row of .* fulfils"):
        rows(f"{{{{ table {path} | where: seconds > 9 }}}}")


def test_an_origin_names_the_file_its_rows_and_a_day() -> None:
    text = on_page_markdown("before {{ origin results/tables/quickstart.csv }} after")
    pattern = r"before Rows of `results/tables/quickstart.csv`: 3(, as of \d{4}-\d\d-\d\d)?\. after"
    assert re.fullmatch(pattern, text)


def test_every_table_of_results_is_on_the_results_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    files = [*ROOT.glob("results/tables/*.csv"), *ROOT.glob("results/validation/*.csv")]
    names = [path.relative_to(ROOT).as_posix() for path in files]
    assert len(names) > 5
    assert [name for name in names if f"{{{{ table {name}" not in page] == []
    assert [name for name in names if f"{{{{ origin {name} }}}}" not in page] == []


def test_a_pivot_makes_columns_of_values(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("case,quantity,value\na,seconds,1.5\na,bytes,8.5\nb,seconds,2.5\n")
    assert rows(f"{{{{ table {path} | pivot: quantity }}}}") == [
        ["case", "bytes", "seconds"],
        ["a", "8.5", "1.5"],
        ["b", "", "2.5"],
    ]


def test_every_field_of_a_hardware_file_has_a_row() -> None:
    text = on_page_markdown("{{ fields }}")
    schema = SCHEMAS["cluster"]()
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    for part in ("Device", "Link", "Processes", "SizeCurve", "KernelProfile"):
        assert named >= {*schema["$defs"][part]["properties"]}
    assert named >= {*schema["properties"]}
    assert "| `bandwidth_gb_per_s` | GB/s |" in text
    assert "| `half_size_mb` | MB | 0 |" in text


def test_every_backend_has_a_row() -> None:
    assert [row[0] for row in rows("{{ backends }}")[1:]] == [f"`{name}`" for name in BACKENDS]


CELLS = pd.DataFrame({
    "model": ["a/x", "a/x", "b/y", "b/y"],
    "method": ["shard_2x4", "1f1b_2", "shard_2x4", "1f1b_2"],
    "outcome": ["equal", "refused", "equal", "refused"],
    "reason": ["", "E: a_step at x.py:3 has 8 rows", "", "E: b_step at y.py:7 has 4 rows"],
    "planning_s": [0.5, None, 1.5, None],
})  # fmt: skip


def test_public_models_are_counted_by_method_model_and_reason() -> None:
    assert reach_methods(CELLS).splitlines()[2:] == [
        "| `shard_2x4` | 2 | 0 | 1 |",
        "| `1f1b_2` | 0 | 2 |  |",
    ]
    assert reach_models(CELLS).splitlines()[2:] == ["| `a/x` | 1 | 1 |", "| `b/y` | 1 | 1 |"]
    assert reach_refusals(CELLS).splitlines()[2:] == [
        "| refused | 2 | `a/x`, `b/y` | E: a_step at x.py:3 has 8 rows |"
    ]
    assert reach_refusals(CELLS[CELLS.outcome == "equal"]) == "No model is refused."


def test_every_primitive_with_a_record_is_listed() -> None:
    text = on_page_markdown("{{ primitives }}")
    assert all(f"`{name}`" in text for records in FAMILIES.values() for name in records)
