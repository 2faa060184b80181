"""The command line predicts programs and fits profiles to tables.

`test_what_if` tests its scenarios, `test_validation` its comparisons with published numbers.
"""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from simulator.calibration.measured_samples import DATA
from simulator.cli import app
from simulator.engine.breakdown import predict
from simulator.hardware import collective_profile
from simulator.hardware.cluster import Cluster
from simulator.hardware.collective_profile import CollectiveProfile
from simulator.hardware.description import read, validate
from simulator.program import Program, Run
from simulator.program_file import save_program
from simulator.work import Kernel
from tests.simulator.test_breakdown import PIPELINE


@pytest.fixture
def program(tmp_path: Path) -> Path:
    save_program(PIPELINE, tmp_path / "program.json")
    return tmp_path / "program.json"


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.stdout if not code else " ".join(result.output.split())


def test_predictions_of_the_command_line_equal_those_of_python(program: Path) -> None:
    rows = json.loads(
        run("simulate", program, "--cluster", "dgx_h100", "--cluster", "a2_uneven", "--json")
    )
    assert list(rows) == ["dgx_h100", "a2_uneven"]
    expected = predict(PIPELINE, Cluster.load("dgx_h100"))
    assert rows["dgx_h100"]["seconds"] == expected.seconds
    assert rows["dgx_h100"]["allocated"] == expected.memory.total == 9
    assert rows["dgx_h100"]["mfu"] is None  # the FLOP of the model are not part of a program


def test_a_change_of_the_cluster_changes_the_prediction(program: Path) -> None:
    def seconds(*change: str) -> float:
        return json.loads(run("simulate", program, "--cluster", "dgx_h100", "--json", *change))[
            "dgx_h100"
        ]["seconds"]

    assert seconds("--what-if", "cluster.device.kernel_launch_us=10x") > seconds()
    assert seconds("--what-if", "cluster.device=v100_sxm2_16gb") != seconds()


def test_the_table_has_a_line_for_each_known_quantity(program: Path) -> None:
    table = run("simulate", program, "--cluster", "dgx_h100")
    assert all(
        label in table
        for label in (
            "step, s",
            "bubble",
            "pipeline, exposed (of)",
            "memory, GB",
            "fits, with reserve",
        )
    )
    assert not any(label in table for label in ("tokens per s", "MFU", "cost unknown"))


def test_kernels_of_unknown_cost_are_in_the_table(tmp_path: Path) -> None:
    body = (Kernel("r", "memory", 0, 32, unmodelled="custom-call mystery"),)
    save_program(Program(((0,),), ((Run(0, "S"),),), {"0S": body}), tmp_path / "program.json")
    table = run("simulate", tmp_path / "program.json")
    assert "cost unknown: custom-call mystery" in table
    assert "memory" not in table


def test_a_timeline_is_drawn_and_written(program: Path, tmp_path: Path) -> None:
    run(
        "simulate",
        program,
        "--cluster",
        "dgx_h100",
        "--gantt",
        tmp_path / "g.svg",
        "--trace",
        tmp_path / "t.json",
    )
    assert "<!-- mesh 1 -->" in (tmp_path / "g.svg").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--what-if", "model.layers=3"], "a program can't be changed, only its cluster"),
        (["--what-if", "cluster.inter_host.latency_ms=1"], "unknown field"),
        (
            ["--cluster", "dgx_h100", "--cluster", "h200", "--gantt", "g.svg"],
            "show one timeline, given 2 clusters",
        ),
        (
            ["--what-if", "cluster.devices_per_host=2", "--what-if", "cluster.hosts=1"],
            "mesh 1 has devices (2, 3); cluster",
        ),
        (["--cluster", "h200"], "4 devices are needed, 'h200' has 1 and no inter_host"),
    ],
)
def test_options_that_do_not_fit_a_program_are_refused(
    program: Path, options: list[str], message: str
) -> None:
    assert message in run("simulate", program, *options, code=2)


def test_a_file_without_a_program_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "program.json").write_text("{}")
    assert "expected a program that save_program wrote" in run(
        "simulate", tmp_path / "program.json", code=2
    )


def test_a_profile_is_fitted_to_a_table_of_measurements(tmp_path: Path) -> None:
    header, *rows = (DATA / "collectives.csv").read_text().splitlines()
    h200 = [row for row in rows if "H200" in row]
    (tmp_path / "mine.csv").write_text("\n".join([header, *h200]))
    errors = run("fit-profiles", tmp_path / "mine.csv", "--output", tmp_path / "mine.yaml")
    assert "held_out_error" in errors
    profile = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert profile["gpu"] == h200[0].split(",")[0]
    assert profile["all_reduce"]["held_out_error"] < 0.1


def test_the_shipped_profiles_are_fitted_again_only_into_a_folder_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = collective_profile.PROFILES / "h200.yaml"
    profile = validate(CollectiveProfile, read(shipped), shipped)
    fitted = lambda: [(shipped, profile)]  # noqa: E731
    monkeypatch.setattr("simulator.calibration.shipped_profiles.fit_profiles", fitted)
    before = shipped.read_bytes()
    assert "or --output FOLDER" in run("fit-profiles", code=2)
    assert "h200.yaml" in run("fit-profiles", "-o", tmp_path / "fitted")
    written = tmp_path / "fitted" / "collectives" / "h200.yaml"
    assert validate(CollectiveProfile, read(written), written) == profile
    assert shipped.read_bytes() == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "gpu,kind,size,us\nA,all_reduce,2,3",
            "no column 'bytes'; expected gpu, kind, size, bytes, us",
        ),
        (
            "gpu,kind,size,bytes,us\nA,all_reduce,2,8,3\nB,all_reduce,2,8,3",
            "measurements of A, B; expected those of one",
        ),
        (
            "gpu,kind,size,bytes,us\nA,broadcast,2,8,3",
            "unknown kind 'broadcast'; expected some of all_reduce",
        ),
        (
            "gpu,kind,size,bytes,us\nA,permute,2,8,3",
            "unknown kind 'permute'; it is called 'collective_permute' now; "
            "expected some of all_reduce",
        ),
        ("gpu,kind,size,bytes,us\nA,all_reduce,2,8,3", "1 collectives to fit; expected at least 5"),
    ],
)
def test_a_table_without_enough_valid_measurements_is_refused(
    tmp_path: Path, table: str, message: str
) -> None:
    (tmp_path / "mine.csv").write_text(table)
    assert message in run("fit-profiles", tmp_path / "mine.csv", code=2)
