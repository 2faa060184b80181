"""The examples of the README run as they are printed, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = {
    "An example": ("An example", "Pipelines"),
    "Many hosts": ("An example", "Pipelines", "Many hosts"),
    "Checkpoints": ("An example", "Pipelines", "Batches", "Checkpoints, and hosts that die"),
    "Written by hand": ("Written by hand",),
    "Schedules by hand": ("Schedules by hand", "Schedules that come along", "Tuning"),
}
"""For each program its sections; names carry over from one code block to the next."""

SHORTER = {"10_000": "1_002"}
"""Numbers in examples that are too large for a test, with replacements."""


def section(title: str) -> str:
    """Return the text under a heading, up to the next heading."""
    match = re.search(
        rf"^##+ {re.escape(title)}\n(.*?)(?=^##+ |\Z)", README, re.DOTALL | re.MULTILINE
    )
    assert match, f"README has no section {title!r}"
    return match[1]


def run(titles: tuple[str, ...], folder: Path) -> str:
    """Run the Python blocks of these sections as one program, and return its output."""
    blocks = [
        block
        for title in titles
        for block in re.findall(r"^```python\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    ]
    assert blocks
    script = folder / "example.py"
    text = "\n".join(blocks)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    script.write_text(text)
    # a sparse file of zeros, which takes no room on disk
    np.lib.format.open_memmap(folder / "images.npy", "w+", np.float32, (50_000, 1024))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert not done.returncode, done.stderr[-4000:]
    return done.stdout


def cells(line: str) -> list[str]:
    """Return the cells of a row of a printed table."""
    return [cell.strip() for cell in re.split("[│┃]", line) if cell.strip()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_run_and_print_what_the_readme_says(name, tmp_path):
    printed = run(SCRIPTS[name], tmp_path).splitlines()
    text = "".join(map(section, SCRIPTS[name])).splitlines()
    tables = [line for line in text if line.startswith("    │")]
    assert [row for row in map(cells, tables) if row not in map(cells, printed)] == []
    programs = [
        line.strip().removesuffix("...") for line in text if re.match("    mesh [0-9]+: ", line)
    ]
    assert [
        start for start in programs if not any(line.startswith(start) for line in printed)
    ] == []
    assert bool(tables and programs) == ("An example" in SCRIPTS[name])
