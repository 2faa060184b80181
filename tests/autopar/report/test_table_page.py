"""Pages of tables: every value is shown, numbers sort as numbers, and nothing is fetched."""

import re
from html import unescape

import pytest

from autopar.report import PageTable, table_page

HOSTILE = """</script><script>alert(1)</script>'"&lt;"""
TABLE = PageTable(
    "cells",
    ("model", "seconds", "count", "fits"),
    (("mlp", 0.25, 1200, True), (HOSTILE, None, 3, False)),
    ("cells/mlp.html", None),
    "Seconds of a step.",
)


def test_cells_are_values_with_links():
    page = table_page("Results", [TABLE], {})
    assert TABLE.numeric == (False, True, True, False)
    assert '<a href="cells/mlp.html">report</a>' in page
    assert '<td class="number" data-value="0.25">0.25</td>' in page
    assert '<td class="number" data-value="1200">1,200</td>' in page
    assert '<td class="number" data-value="">–</td>' in page  # unknown
    assert "<td>True</td>" in page
    assert page.count("<script") == table_page("Results", [], {}).count("<script")
    assert HOSTILE in unescape(page)


def test_figures_are_inside_the_page():
    page = table_page("Results", [], {"time & <memory>": "<svg><title>x</title></svg>"})
    assert 'src="data:image/svg+xml;base64,' in page
    assert 'alt="time &amp; &lt;memory&gt;"' in page
    assert set(re.findall(r"https?://[^\s\"'`<]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_an_empty_table_is_shown():
    assert PageTable("empty", ("a", "b"), ()).numeric == (False, False)
    assert "<td" not in table_page("Results", [PageTable("empty", ("a", "b"), ())], {})


def test_tables_of_the_wrong_form_are_refused():
    with pytest.raises(ValueError, match="2 columns and a row of 1 values"):
        PageTable("t", ("a", "b"), ((1,),))
    with pytest.raises(ValueError, match="1 rows and 2 links"):
        PageTable("t", ("a",), ((1,),), ("x", "y"))
    with pytest.raises(ValueError, match="two tables are called 'cells'"):
        table_page("Results", [TABLE, TABLE], {})
