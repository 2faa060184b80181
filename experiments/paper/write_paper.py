"""Writes the summary of all figures, the numbers of the text, the page and the paper.

python -m experiments.paper.write_paper FOLDER TEXT CODE
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import typst

from autopar.report import PageTable, table_page
from experiments.paper.comparison import Agreement, agreement, compared_rows
from experiments.paper.compute_rows import write_table
from experiments.paper.figure_files import TEXT, write_record
from experiments.paper.published_values import Claim, checked_claims
from experiments.paper.study import FIGURES, PaperFigure, Table
from experiments.sweep_progress import say

type Numbers = Mapping[str, Mapping[str, str]]


def main(folder: str, text: str, code: str) -> None:
    """Write everything that is made from the rows of all figures.

    Args:
        folder: the folder of the results.
        text: the Typst source of the paper.
        code: the hash of the code that writes them.
    """
    results = Path(folder)
    tables: dict[str, Table] = {
        figure.name: pd.read_csv(results / f"{figure.name}.csv") for figure in FIGURES
    }
    good = {name: table[table["status"] == "ok"] for name, table in tables.items()}
    claims = {figure.name: checked_claims(figure, tables[figure.name]) for figure in FIGURES}
    agreements = [agreement(name, table, claims[name]) for name, table in tables.items()]
    summary = pd.DataFrame(one.as_row() for one in agreements)
    write_table(summary, results / "summary.csv")
    numbers = text_numbers(agreements, good, claims)
    (results / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    page = table_page(
        "The paper",
        [_summary_table(summary), _claims_table(claims), *map(_page_table, FIGURES, good.values())],
        {_title(figure, results): _drawing(figure, results) for figure in FIGURES},
        summary="Published numbers and claims beside ours.",
    )
    (results / "index.html").write_text(page)
    pdf = typst.compile(Path(text).read_bytes(), root=str(results.resolve()), timestamp=0)  # pyright: ignore[reportArgumentType]
    assert isinstance(pdf, bytes)
    (results / "paper.pdf").write_bytes(pdf)
    write_record(results, TEXT, code)
    say(f"paper     {results / 'paper.pdf'}")


def text_numbers(
    agreements: list[Agreement],
    tables: Mapping[str, Table],
    claims: Mapping[str, Mapping[Claim, bool]],
) -> Numbers:
    """Return the numbers that the text names, by figure and name.

    Args:
        agreements: how far each figure agrees with its document.
        tables: rows of each figure that did not fail.
        claims: whether each claim holds, by figure.
    """
    numbers: dict[str, dict[str, str]] = {}
    for one, figure in zip(agreements, FIGURES, strict=True):
        own = getattr(figure.module, "numbers", lambda table: {})(tables[figure.name])
        numbers[figure.name] = {
            "rows": str(one.rows),
            "compared": str(one.compared),
            "mean": _percent(one.mean_deviation),
            "largest": _percent(one.largest_deviation),
            "order": _of(one.pairs_kept, one.pairs),
            "memory": _of(one.memory_agrees, one.memory_rows),
            "claims": _of(one.claims_kept, one.claims),
            "document": figure.document,
            "difference": figure.difference,
            **own,
        }
    kept = [holds for by_claim in claims.values() for holds in by_claim.values()]
    numbers["all"] = {
        "figures": str(len(agreements)),
        "compared": str(sum(one.compared for one in agreements)),
        "claims": _of(sum(kept), len(kept)),
        "order": _of(sum(a.pairs_kept for a in agreements), sum(a.pairs for a in agreements)),
        "memory": _of(
            sum(a.memory_agrees for a in agreements), sum(a.memory_rows for a in agreements)
        ),
    }
    return numbers


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "–"


def _summary_table(summary: Table) -> PageTable:
    return PageTable("Agreement", list(summary.columns), _values(summary))


def _claims_table(claims: Mapping[str, Mapping[Claim, bool]]) -> PageTable:
    rows = [
        (claim.figure, claim.document, claim.words, "holds" if holds else "does not hold")
        for by_claim in claims.values()
        for claim, holds in by_claim.items()
    ]
    return PageTable("Claims in words", ["figure", "document", "claim", "ours"], rows)


def _page_table(figure: PaperFigure, table: Table) -> PageTable:
    shown = table.dropna(axis="columns", how="all").drop(columns="status")
    if {"published", "ours"} <= set(shown):
        shown = shown.assign(deviation=compared_rows(shown)["deviation"])
    note = ". ".join(text.rstrip(".") for text in (figure.document, figure.difference) if text)
    return PageTable(figure.name, list(shown.columns), _values(shown), note=note)


def _values(table: Table) -> list[list[object]]:
    """Return the values of a table, None where there is none."""
    return table.astype(object).where(table.notna(), None).to_numpy().tolist()


def _title(figure: PaperFigure, results: Path) -> str:
    return f"{figure.name}: {(results / figure.name).with_suffix('.txt').read_text().strip()}"


def _drawing(figure: PaperFigure, results: Path) -> str:
    return (results / figure.name).with_suffix(".svg").read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
