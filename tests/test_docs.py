"""The Python blocks of README.md and of the documentation run, and print what the pages claim.

The blocks of a page are one script, and the commands of its `sh` blocks are one session. A `text`
block claims some of the lines that the Python block or the commands before it print, in order;
`...` stands for anything, and runs of spaces and of table borders count as one space.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from autopar.command_line import app
from simulator.cli.error_lines import NO
from simulator.hardware.heterogeneous import load_cluster

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FAST = ("README.md", "docs/guides/what-if.md", "docs/concepts/simulator.md")
"""Pages whose scripts take seconds; the others start several processes or compile many programs."""

STEP_COMMAND = "^autopar ((?:new|plan|show|predict|diff|explain|compare|report|fit|savings) .*)"
"""Commands about steps; `simulator/test_documented_commands.py` runs the simulator's."""

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def claims(page: Path, language: str) -> list[str]:
    """Return the lines of `text` blocks whose last block before them is in a language."""
    lines: list[str] = []
    last = ""
    for kind, text in BLOCK.findall(page.read_text()):
        if kind != "text":
            last = kind
        elif last == language:
            lines += [words(line) for line in text.splitlines() if words(line)]
    return lines


SCRIPTS = [
    pytest.param(page, id=name(page), marks=() if name(page) in FAST else (pytest.mark.slow,))
    for page in PAGES
    if blocks(page, "python")
]


def words(line: str) -> str:
    """Return a printed line with one space for each run of spaces and table borders."""
    return re.sub(r"[\s│┃]+", " ", line).strip()


def missing(claims: list[str], printed: list[str]) -> list[str]:
    """Return the claimed lines that are not printed, or not in this order."""
    absent, lines = [], iter(printed)
    for claim in claims:
        pattern = re.compile(".*".join(map(re.escape, claim.split("..."))))
        rest = list(lines)
        position = next((n for n, line in enumerate(rest) if pattern.fullmatch(line)), None)
        if position is None:
            absent.append(claim)
        lines = iter(rest[0 if position is None else position + 1 :])
    return absent


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_page_runs_and_prints_what_it_claims(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert not done.returncode, done.stderr[-4000:]
    printed = [words(line) for line in done.stdout.splitlines()]
    assert missing(claims(page, "python"), printed) == [], done.stdout[-4000:]


def test_the_claims_of_the_readme_are_those_of_the_tables() -> None:
    """The README names a table beside each number."""
    text = " ".join((ROOT / "README.md").read_text().split())
    quickstart = pd.read_csv(ROOT / "results/tables/quickstart.csv")
    assert f"within {quickstart.step_time_error_percent.abs().max():.1f} % of" in text
    summary = pd.read_csv(ROOT / "results/validation/summary.csv", index_col="set")
    assert summary["fitted"]["vtrain-multi-node"] == 0
    assert f"A100s is {100 * summary['mape']['vtrain-multi-node']:.1f} %, and no" in text
    ahead = pd.read_csv(ROOT / "results/tables/pipeline_quality.csv").ahead
    assert ahead.min() > -5e-4
    assert f"up to {100 * ahead.max():.1f} % faster" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page))
        for page in PAGES
        if any(re.search(STEP_COMMAND, text, re.MULTILINE) for text in blocks(page, "sh"))
    ],
)
def test_the_commands_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    for text in blocks(page, "sh"):
        for command in re.findall(STEP_COMMAND, text, re.MULTILINE):
            result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "105"})
            assert result.exit_code in (0, NO), f"{command}: {result.output}"
            printed += map(words, result.output.splitlines())
    assert missing(claims(page, "sh"), printed) == [], "\n".join(printed)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name(page)) for page in PAGES if blocks(page, "yaml")]
)
def test_a_yaml_block_is_a_cluster(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        path = tmp_path / "ours.yaml"
        path.write_text(text)
        assert load_cluster(path).name == "ours"


def test_the_table_of_measured_steps_is_predicted_and_a_bad_row_is_named(tmp_path: Path) -> None:
    page = ROOT / "docs/reference/measured-steps.md"
    (table,) = blocks(page, "csv")
    _, row = table.splitlines()
    path = tmp_path / "steps.csv"
    path.write_text(table + f"{row}\n{row}\n{row.replace('H100', 'TPU')}\n")
    command = ["validate", "--data", str(path), "--no-write"]
    (steps,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [case["predicted"] > 0 for case in steps["cases"]] == 3 * [True]
    result = CliRunner().invoke(app, command)
    assert result.exit_code in (0, NO), result.stderr
    assert missing(claims(page, "csv"), [words(line) for line in result.stdout.splitlines()]) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "{{"))]
    assert [line for line in lines if len(line) > 100 and "options: {" not in line] == []


def test_a_link_to_a_page_exists() -> None:
    """README.md links to files of the repository; MkDocs checks the links of the other pages."""
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_line_that_is_not_printed_is_missing() -> None:
    assert missing(["a ... c", "d"], ["a b c", "x", "d"]) == []
    assert missing(["d", "a b"], ["a b", "d"]) == ["a b"]


def test_the_site_builds(tmp_path: Path) -> None:
    """MkDocs finds every page, link, anchor and API name, and every table has rows."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert not done.returncode, done.stderr[-4000:]
    left = [page for page in (tmp_path / "site").rglob("*.html") if "{{" in page.read_text()]
    assert left == []
