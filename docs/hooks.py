"""A MkDocs hook that replaces markers in pages with generated Markdown tables.

- `{{ table PATH | pivot: NAME | columns: a, b | where: EXPRESSION }}` includes a CSV file of the
  repository. The pivot is a column whose values become columns, filled with those of the column
  `value`. The expression is one of `pandas.DataFrame.query`. All three may be left out.
- `{{ origin PATH }}` names a CSV file, its number of rows, and the day of its last commit.
- `{{ fields }}` lists the fields of the files that describe hardware, from their JSON schemas.
- `{{ backends }}` lists the software backends of the simulator and their costs.
- `{{ reach methods }}`, `{{ reach models }}` and `{{ reach refusals }}` summarize what became of
  public models: by method, by model, and by the reason of a refusal.
- `{{ primitives }}` lists the primitives in the registry of the planner, by family.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from autopar.primitives import FAMILIES
from simulator import BACKENDS
from simulator.hardware.schema import SCHEMAS

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"\{\{ (table|origin|fields|backends|reach|primitives)(.*?) \}\}")

UNITS = {
    "gb_per_s": "GB/s",
    "gb_per_s_per_core": "GB/s",
    "tflop_per_s": "TFLOP/s",
    "gb": "GB",
    "mb": "MB",
    "us": "µs",
    "ns": "ns",
}
"""Units by the suffix of a field's name."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace all markers of a page; MkDocs calls this for each page."""
    return MARKER.sub(_generated, markdown)


def _generated(marker: re.Match[str]) -> str:
    match marker[1]:
        case "fields":
            return hardware_fields()
        case "backends":
            return backends()
        case "origin":
            return csv_origin(marker[2].strip())
        case "primitives":
            return primitives()
        case "reach":
            return REACH[marker[2].strip()](pd.read_csv(ROOT / "results/tables/reach.csv"))
        case _:
            path, *parts = (part.strip() for part in marker[2].split(" | "))
            options = dict(part.split(": ", 1) for part in parts)
            return csv_table(path, **options)


def csv_table(path: str, *, pivot: str = "", columns: str = "", where: str = "") -> str:
    """Return rows and columns of a CSV file of the repository as a Markdown table."""
    frame = pd.read_csv(ROOT / path)
    if pivot:
        keys = [name for name in frame.columns if name not in (pivot, "value")]
        frame = frame.pivot(index=keys, columns=pivot, values="value").reset_index()
    if where:
        frame = frame.query(where)
    frame = frame[columns.split(", ")] if columns else frame
    if frame.empty:
        raise ValueError(f"no row of {path} fulfils {where!r}")
    rows = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    return _markdown([*frame.columns], rows)


def csv_origin(path: str) -> str:
    """Return a sentence about a CSV file of the repository; the day is left out without git."""
    command = ["git", "log", "-1", "--format=%cs", "--", path]
    day = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    since = f", as of {day}" if day else ""
    return f"Rows of `{path}`: {len(pd.read_csv(ROOT / path))}{since}."


def hardware_fields() -> str:
    """Return a section with a table of fields for each part of a file that describes hardware."""
    schema = SCHEMAS["cluster"]()
    sections = []
    for name, part in {"Cluster": schema, **schema["$defs"]}.items():
        required = part.get("required", ())
        rows = [
            [f"`{field}`", _unit(field), _default(value, field in required), value["description"]]
            for field, value in part.get("properties", {}).items()
            if "description" in value
        ]
        if rows:
            table = _markdown(["field", "unit", "default", "meaning"], rows)
            title = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize()
            sections.append(f"## {title}\n\n{part['description'].split('\n\n')[0]}\n\n{table}")
    return "\n\n".join(sections)


def backends() -> str:
    """Return a table of the software backends: microseconds per kernel, instruction and step."""
    rows = [
        [f"`{each.name}`", *map(_cell, (each.kernel_us, each.instruction_us, each.step_us))]
        for each in BACKENDS.values()
    ]
    return _markdown(["backend", "kernel (µs)", "instruction (µs)", "step (µs)"], rows)


def primitives() -> str:
    """Return a table of the primitives with a record: those with a sharding rule, and others."""
    rows = []
    for family, records in FAMILIES.items():
        whole = {name for name, record in records.items() if record.is_replicated_only}
        names = [", ".join(f"`{name}`" for name in group) for group in _split(records, whole)]
        rows.append([family.replace("_", " "), *names])
    return _markdown(["family", "sharded", "whole, or as written in shard_map"], rows)


def _split(names: Iterable[Any], second: set[Any]) -> tuple[list[Any], list[Any]]:
    """Return the names outside and inside of a set, sorted by their text."""
    ordered = sorted(names, key=str)
    return [name for name in ordered if name not in second], [n for n in ordered if n in second]


def reach_methods(cells: pd.DataFrame) -> str:
    """Return the number of public models with each outcome by method, and the planning time."""
    counts = pd.crosstab(cells.method, cells.outcome).reindex(cells.method.unique())
    rows = [
        [f"`{method}`", *map(str, row), _cell(cells[cells.method == method].planning_s.median())]
        for method, *row in counts.itertuples()
    ]
    return _markdown(["method", *counts.columns, "median planning time (s)"], rows)


def reach_models(cells: pd.DataFrame) -> str:
    """Return the number of methods with each outcome by public model."""
    counts = pd.crosstab(cells.model, cells.outcome)
    rows = [[f"`{model}`", *map(str, row)] for model, *row in counts.itertuples()]
    return _markdown(["model", *counts.columns], rows)


def reach_refusals(cells: pd.DataFrame) -> str:
    """Return an example of each kind of refusal and failure, with its models."""
    others = cells[~cells.outcome.isin(["equal", "predicted"])]
    if others.empty:
        return "No model is refused."
    kinds = others.reason.str.replace(r"[`'\"].*?[`'\"]|\S*\d\S*|\w+_step", "", regex=True).str[:60]
    rows = []
    for _, kind in others.groupby(kinds, sort=False):
        models = ", ".join(f"`{model}`" for model in kind.model.unique())
        rows.append([kind.outcome.iloc[0], str(len(kind)), models, _cell(kind.reason.iloc[0])])
    rows.sort(key=lambda row: -int(row[1]))
    return _markdown(["outcome", "cells", "models", "for example"], rows)


REACH = {"methods": reach_methods, "models": reach_models, "refusals": reach_refusals}
"""The tables of public models, by the word in their marker."""


def _unit(field: str) -> str:
    return next((unit for suffix, unit in UNITS.items() if field.endswith(f"_{suffix}")), "")


def _default(field: dict[str, Any], required: bool) -> str:
    return "required" if required else _cell(field.get("default"))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "\\|")


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
