"""The hash of the code changes with every file, and every rule depends on it."""

import re
import shutil
from pathlib import Path

from experiments import sources
from experiments.sources import CODE, ROOT, code_hash, package_content


def test_the_hash_changes_with_any_file_of_a_package(tmp_path: Path, monkeypatch) -> None:
    for package in CODE:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc", "results")
        )
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def forget() -> None:
        code_hash.cache_clear()
        package_content.cache_clear()

    def fresh() -> str:
        forget()
        return code_hash(*CODE)

    before = fresh()
    assert before == fresh()
    for name in (
        "autopar/sharding/ilp.py",
        "simulator/engine/simulation.py",
        "experiments/models/gpt.py",
        "simulator/hardware/profiles/collectives/h100.yaml",
    ):
        path = tmp_path / name
        path.write_text(path.read_text() + "\n# changed\n")
        assert fresh() != before
        before = fresh()
    (tmp_path / "autopar/new.py").write_text("")
    assert fresh() != before
    forget()


def test_every_rule_that_runs_code_depends_on_it() -> None:
    rules = {path.name: path.read_text() for path in (ROOT / "experiments/rules").glob("*.smk")}
    running = {name: len(re.findall(r"{PYTHON}|{ISOLATE}", text)) for name, text in rules.items()}
    hashed = {
        name: len(re.findall(r"\bcode=(code_hash|rows_code)\(", text))
        for name, text in rules.items()
    }
    assert running == hashed
    assert [name for name, count in running.items() if not count] == ["record.smk"]  # copies files
