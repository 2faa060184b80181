"""The check of a configuration is repeated only if something that it depends on changed."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import checked_sweep as module
from experiments.checked_sweep import checked_sweep
from experiments.sources import ROOT
from experiments.sweep import make_sweep

CONFIG = ROOT / "experiments/config"


@pytest.fixture
def config() -> Any:
    """Return the smoke configuration with the defaults of its other keys."""
    default, smoke = (
        yaml.safe_load((CONFIG / f"{n}.yaml").read_text()) for n in ("default", "smoke")
    )
    return default | smoke


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each configuration that is checked."""
    checked = []

    def recorded(config: Any) -> Any:
        checked.append(copy.deepcopy(config))
        return make_sweep(config)

    monkeypatch.setattr("experiments.sweep.make_sweep", recorded)
    return checked


def test_the_same_configuration_is_checked_once(
    config: Any, checks: list[Any], tmp_path: Path
) -> None:
    kept = tmp_path / "folder/sweep.json"
    first, second = checked_sweep(config, kept), checked_sweep(config, kept)
    assert first == second == make_sweep(config)
    assert len(checks) == 1
    config["measure"]["repeat"] += 1
    assert checked_sweep(config, kept).measure == config["measure"]
    assert len(checks) == 2


def test_changed_code_is_a_reason_to_check_again(
    config: Any, checks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "sweep.json"
    checked_sweep(config, kept)
    monkeypatch.setattr(module, "code_hash", lambda *_: "another")
    checked_sweep(config, kept)
    assert len(checks) == 2


@pytest.mark.parametrize("change", ["edit", "delete"])
def test_a_changed_cluster_is_a_reason_to_check_again(
    config: Any, checks: list[Any], tmp_path: Path, change: str
) -> None:
    cluster = tmp_path / "ours.yaml"
    shutil.copy(ROOT / "simulator/hardware/clusters/p3.16xlarge.yaml", cluster)
    config["platforms"][0]["cluster"] = str(cluster)
    kept = tmp_path / "sweep.json"
    checked_sweep(config, kept)
    if change == "edit":
        cluster.write_text(cluster.read_text() + "\n# changed\n")
        checked_sweep(config, kept)
    else:
        cluster.unlink()
        with pytest.raises(ValueError, match=r"ours\.yaml"):
            checked_sweep(config, kept)
    assert len(checks) == 2


def test_a_wrong_configuration_is_refused_every_time(config: Any, tmp_path: Path) -> None:
    config["meshes"] = [[16]]
    for _ in range(2):
        with pytest.raises(ValueError, match="has 16 devices"):
            checked_sweep(config, tmp_path / "sweep.json")


def test_a_key_without_quotes_is_refused_although_it_reads_like_a_checked_one(
    config: Any, tmp_path: Path
) -> None:
    config["models"]["mlp"] |= {"2048": {"dim": 2, "num_layers": 1, "batch_size": 2}}
    checked_sweep(config, tmp_path / "sweep.json")
    config["models"]["mlp"][2048] = config["models"]["mlp"].pop("2048")
    with pytest.raises(ValueError, match=r"models\.mlp: a key 2048; expected a text, in quotes"):
        checked_sweep(config, tmp_path / "sweep.json")


def test_a_result_that_was_cut_off_is_no_obstacle(config: Any, tmp_path: Path) -> None:
    (tmp_path / f".{os.getpid()}.sweep.json").write_text("{")
    assert checked_sweep(config, tmp_path / "sweep.json") == make_sweep(config)


def test_what_a_run_with_nothing_to_do_imports_is_light() -> None:
    """Importing JAX alone takes a second."""
    program = (
        "import sys, experiments.checked_sweep, experiments.sweep_run\n"
        "print(sorted({'jax', 'autopar', 'simulator', 'pandas', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == "[]"
