"""Published numbers and claims that the paper compares with, and checks of their files."""

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from experiments.paper.study import FIGURES, PaperFigure, Table
from experiments.sources import ROOT

FOLDER = ROOT / "experiments/paper/published"
CLAIMS = FOLDER / "claims.csv"
DIGESTS = "experiments/paper/published/SHA256SUMS"
"""File with the SHA-256 of each file of published numbers, as `sha256sum` writes it."""

type Factor = Literal[
    "experts_two_hosts",
    "efficiency_four_hosts",
    "program_over_operators",
    "program_over_layers",
    "local_all_gather",
]
"""The names of the factors in alpa_factors.csv."""

_HEADINGS = ("# source: ", "# page: ", "# read: ")
"""What the first lines of a file say: the document, the page, and how the numbers were read."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that a document makes in words.

    Attributes:
        name: its name.
        figure: the figure that checks it.
        document: the document, and where in it.
        words: what it claims, in our words.
    """

    name: str
    figure: str
    document: str
    words: str


def published_table(name: str) -> Table:
    """Return a file of `experiments/paper/published`.

    Raises:
        ValueError: the file has no source, or lacks a value.
    """
    import pandas as pd  # only the jobs need it, not the workflow

    path = FOLDER / f"{name}.csv"
    _check_headings(path)
    _check_values(path)
    return pd.read_csv(path, comment="#", na_values=["-"])


def published_factor(name: Factor) -> float:
    """Return a factor that Zheng et al. (OSDI'22) give in words, by name."""
    return float(published_table("alpa_factors").set_index("name")["factor"][name])


def claims_of(figure: str) -> dict[str, Claim]:
    """Return the claims that a figure checks, by name."""
    import pandas as pd

    table = pd.read_csv(CLAIMS, comment="#", dtype=str)
    claims = [Claim(**row) for row in table.to_dict("records")]  # pyright: ignore[reportCallIssue]
    return {claim.name: claim for claim in claims if claim.figure == figure}


def checked_claims(figure: PaperFigure, table: Table) -> dict[Claim, bool]:
    """Return whether each claim that a figure checks holds for its rows.

    Claims of a figure of which a part failed are not checked.

    Args:
        figure: the figure.
        table: its rows.

    Raises:
        ValueError: the file of claims and the figure's module have different claims.
    """
    claims = claims_of(figure.name)
    if (table["status"] != "ok").any():
        return {}
    if not hasattr(figure.module, "claims"):
        holds: dict[str, bool] = {}
    else:
        holds = figure.module.claims(table)
    if different := sorted(claims.keys() ^ holds.keys()):
        raise ValueError(
            f"claim {different[0]!r} of {figure.name}: expected in {CLAIMS.name} and in the"
            " function `claims` of its module"
        )
    return {claims[name]: bool(holds[name]) for name in claims}


def check_published(figures: Iterable[PaperFigure] = FIGURES, root: Path = ROOT) -> None:
    """Check that the files of published numbers are complete.

    Args:
        figures: the figures.
        root: the root of the project.

    Raises:
        ValueError: a file is missing, does not say its source, lacks a value, has one that is no
            number in a column of numbers, or is not the one whose digest is recorded.
    """
    for file in sorted({file for figure in figures for file in figure.published}):
        path = root / file
        if not path.exists():
            raise ValueError(f"published numbers: no file {path}")
        if path.parent.name != "published":  # results, in which a value may be missing
            continue
        if path.is_relative_to(root / FOLDER.relative_to(ROOT)):  # others name theirs in a README
            _check_headings(path)
        _check_values(path)
        if path == FOLDER / "alpa_factors.csv":
            _check_factors(path)
        _check_digest(file, root)


def _check_headings(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, heading in enumerate(_HEADINGS):
        if number >= len(lines) or not lines[number].startswith(heading):
            raise ValueError(f"{path}, line {number + 1}: expected it to start with {heading!r}")


def _check_values(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    columns, *rows = list(csv.reader(lines))
    if not rows:
        raise ValueError(f"{path}: no rows; expected published numbers")
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}, row {number}: {len(row)} values; expected {len(columns)}, of the columns"
                f" {', '.join(columns)}"
            )
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        given = [value for value in values if value not in _NO_NUMBERS]
        has_numbers = sum(map(_is_number, given)) > len(given) / 2
        for number, value in enumerate(values, 1):
            where = f"{path}, row {number}, column {column}"
            if not value.strip():
                raise ValueError(
                    f"{where}: no value; expected the published one, or - where the document has"
                    " none"
                )
            if has_numbers and value in given and not _is_number(value):
                raise ValueError(f"{where}: {value!r}; expected a number, as in most rows")


_NO_NUMBERS = "-", "OOM"
"""What a column of numbers has where the document has none."""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_factors(path: Path) -> None:
    names = set(published_table(path.stem)["name"])
    if different := sorted(names ^ set(get_args(Factor.__value__))):
        raise ValueError(
            f"{path}, column name: {different[0]!r}; expected in the file and in `Factor`"
        )


def _check_digest(file: str, root: Path) -> None:
    """Check that no row was removed and no value changed.

    Raises:
        ValueError: the digest of the file is not the one in `DIGESTS`.
    """
    digest = hashlib.sha256((root / file).read_bytes()).hexdigest()
    line = f"{digest}  {file}"
    if line not in (root / DIGESTS).read_text().splitlines():
        raise ValueError(
            f"{root / file}: its digest is not the one in {DIGESTS}, so that a row or a value"
            f" differs; restore the file, or, if the change is meant, record it there as {line!r}"
        )
