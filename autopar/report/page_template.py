"""The templates of pages: HTML with its styles and scripts inside."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = files("autopar.report") / "page_files"

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def format_seconds(seconds: float) -> str:
    """Return seconds with a unit, in four digits."""
    return _with_unit(seconds, _SECONDS)


def format_bytes(num_bytes: float) -> str:
    """Return bytes with a decimal unit, in four digits."""
    return _with_unit(num_bytes, _BYTES)


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return f"0 {dict(units)[1.0]}"
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    return f"{value / scale:.4g} {unit}"


@cache
def environment() -> "Environment":
    """Return the templates, which escape every value that they insert."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    templates = Environment(
        loader=FunctionLoader(_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates.globals["include_text"] = lambda name: Markup(_text(name))
    templates.filters |= {
        "seconds": format_seconds,
        "size": format_bytes,
        "count": lambda number: f"{number:,.0f}",
        "percent": lambda part: f"{part:.1%}",
    }
    return templates


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """Return a page.

    Text that UTF-8 can't encode, lone surrogates, becomes numeric character references.

    Args:
        template: the file of its template.
        values: the variables of the template.
    """
    page = environment().get_template(template).render(values)
    return page.encode("utf-8", "xmlcharrefreplace").decode()
