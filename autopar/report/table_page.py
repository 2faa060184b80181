"""Pages of tables and figures, as one HTML file in the style of report pages."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from autopar.report.page_template import render_page


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table whose rows a reader sorts and filters.

    Attributes:
        title: its title, unique on the page.
        columns: names of its columns.
        rows: a value for each column; None for an unknown one.
        links: for each row, the address of the page about it; None where there is none. Empty if
            no row has a page.
        note: a sentence about the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    links: Sequence[str | None] = ()
    note: str = ""
    numeric: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        if wrong := [row for row in self.rows if len(row) != len(self.columns)]:
            raise ValueError(
                f"{self.title!r} has {len(self.columns)} columns and a row of {len(wrong[0])}"
                " values; expected a value for each column"
            )
        if self.links and len(self.links) != len(self.rows):
            raise ValueError(
                f"{self.title!r} has {len(self.rows)} rows and {len(self.links)} links; expected"
                " one for each row, or none"
            )
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        object.__setattr__(self, "numeric", tuple(map(_is_numeric, columns)))


def _is_numeric(values: Sequence[Any]) -> bool:
    """Return whether all values that are known are numbers."""
    known = [value for value in values if value is not None]
    return bool(known) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in known
    )


def table_page(
    title: str,
    tables: Sequence[PageTable],
    figures: Mapping[str, str],
    *,
    summary: str = "",
) -> str:
    """Return an HTML page of tables and figures.

    The page has its styles, scripts and figures inside; it makes no request.

    Args:
        title: the title of the page.
        tables: the tables.
        figures: SVG documents by title.
        summary: a sentence below the title.

    Raises:
        ValueError: two tables have the same title.
    """
    titles = [table.title for table in tables]
    if repeated := [name for name in titles if titles.count(name) > 1]:
        raise ValueError(f"two tables are called {repeated[0]!r}; give each its own title")
    images = {
        name: "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()
        for name, svg in figures.items()
    }
    values = {"title": title, "summary": summary, "tables": tables, "figures": images}
    return render_page("table_page.html.j2", values | {"text_of": _text})


def _text(value: Any) -> str:
    """Return a value as the text of its cell."""
    if isinstance(value, float):
        return f"{value:,.6g}" if isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
