"""The simulator's command lines in README.md and in the documentation run."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simulator
import simulator.cli.hardware_file_commands
import simulator.cli.validate_command
from simulator.calibration.measured_samples import DATA
from simulator.cli import app
from simulator.cli.error_lines import NO
from simulator.memory import MemoryUse
from simulator.program import Program, Run
from simulator.program_file import save_program
from simulator.validation.published import PUBLISHED_SETS
from simulator.work import Collective, Done, Gemm, Kernel, Start

ROOT = Path(simulator.__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMAND = re.compile(
    r"^autopar ((?:simulate|llm|validate|schema|fit-profiles)\b.*?)(?: +#.*)?$", re.MULTILINE
)
COMMANDS = sorted({command for page in PAGES for command in COMMAND.findall(page.read_text())})


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the commands name; long fits are replaced."""
    (tmp_path / "simulator").symlink_to(ROOT / "simulator")
    product = Kernel("", "gemm", 2 * 4096**3, 1e8, "bf16", Gemm(4096, 4096, 4096))
    body = (product, Start(Collective("c", "all_reduce", 2**28, (tuple(range(8)),))), Done("c"))
    program = Program((tuple(range(8)),), ((Run(0, "S"),),), {"0S": body}, (MemoryUse(10**9),))
    save_program(program, tmp_path / "step.json")
    header, *rows = (DATA / "collectives.csv").read_text().splitlines()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "korthikanti_table5.csv").write_text(
        (DATA / "published" / "korthikanti_table5.csv").read_text()
    )
    (tmp_path / "steps.csv").write_text((DATA / "steps" / "dlperf_gpt_v100.csv").read_text())
    (tmp_path / "collectives.csv").write_text(
        "\n".join([header, *(row for row in rows if "H200" in row)])
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulator.calibration.shipped_profiles, "fit_profiles", lambda: ())
    monkeypatch.setattr(simulator.cli.validate_command, "PUBLISHED_SETS", PUBLISHED_SETS[:1])
    return tmp_path


def run(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "300"})
    assert result.exit_code in (0, NO), result.output
    return result.stdout


def test_every_subcommand_is_documented() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {
        "simulate",
        "llm",
        "validate",
        "schema",
        "fit-profiles",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs(workplace: Path, command: str) -> None:
    run(command)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--what-if" in command])
def test_a_documented_what_if_changes_the_prediction(workplace: Path, command: str) -> None:
    without = re.sub(r" --what-if \S+", "", command)
    before, after = (
        json.loads(run(f"{text.replace(' --json', '')} --json")) for text in (without, command)
    )
    assert [row["seconds"] for row in after.values()] < [row["seconds"] for row in before.values()]
