"""Errors of files of every kind are one short line that names the file."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from autopar.plan import Plan, PlanError
from simulator import ClusterError, ProgramError, load_cluster, load_program, save_program
from simulator.cli import app
from simulator.files import (
    FileError,
    brief,
    parse_json,
    parse_yaml,
    read_table,
    read_text,
    read_yaml,
    replacing,
    write_text,
)
from simulator.report.figure_style import save_figure
from simulator.transformer.scenario_files import Scenario
from tests.simulator.test_program_file import PROGRAM

READERS: dict[str, tuple[Any, type[ValueError]]] = {
    "cluster.yaml": (load_cluster, ClusterError),
    "scenario.yaml": (Scenario.load, ClusterError),
    "program.json": (load_program, ProgramError),
    "plan.json": (Plan.load, PlanError),
    "table.csv": (read_table, FileError),
    "published.yaml": (read_yaml, FileError),
}


@pytest.mark.parametrize("name", READERS)
def test_the_error_of_a_file_that_is_not_utf_8_has_the_line(name: str, tmp_path: Path) -> None:
    read, error = READERS[name]
    path = tmp_path / name
    path.write_bytes(b"name: x\nsource: \xff\n")
    with pytest.raises(error, match=rf"{name}: is not UTF-8: byte 0xff in line 2; expected"):
        read(path)


@pytest.mark.parametrize("name", READERS)
def test_the_error_of_a_missing_file_names_it(name: str, tmp_path: Path) -> None:
    read, error = READERS[name]
    with pytest.raises(
        error, match=rf"{name}: can't be read \(No such file or directory\); expected"
    ):
        read(tmp_path / name)
    with pytest.raises(error, match="null"):
        read(f"\0{name}")


@pytest.mark.parametrize("name", [name for name in READERS if name != "table.csv"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_refused_in_one_line(name: str, text: str, tmp_path: Path) -> None:
    read, error = READERS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(error) as raised:
        read(tmp_path / name)
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize("name", ["cluster.yaml", "scenario.yaml", "published.yaml"])
def test_aliases_that_expand_without_bound_are_refused(name: str, tmp_path: Path) -> None:
    read, error = READERS[name]
    (tmp_path / name).write_text(BOMB)
    with pytest.raises(
        error, match="more than 100,000 values once its aliases are expanded"
    ) as raised:
        read(tmp_path / name)
    assert len(str(raised.value)) < 1000


def test_aliases_of_small_values_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", "text") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }


def test_a_number_with_an_exponent_needs_no_point_and_no_sign() -> None:
    values = parse_yaml("[1e3, 1.5E-3, -2e+3, .5e2, 2.e1, 1e3x, '1e3', e3, 0x1e3]", "text")
    assert values == [1000.0, 0.0015, -2000.0, 50.0, 20.0, "1e3x", "1e3", "e3", 0x1E3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "text: is not YAML: line 2, column 1: 'a' is given twice"),
        ("a: &a [*a]", "an alias is part of itself"),
        ("a: 2026-13-01", "text: is not YAML: month must be in 1..12"),
        ("a: !!int x", "text: is not YAML: invalid literal for int"),
        ("a: !!bool x", "text: is not YAML: 'x'"),
        ("a: [1", "text: is not YAML: line 1, column 6: expected ',' or ']'"),
        ("a: \0", "text: is not YAML: "),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
        ("x" * 2_000_001, "has 2,000,001 characters; expected at most 2,000,000"),
    ],
)
def test_the_error_of_invalid_yaml_is_one_line(text: str, message: str) -> None:
    with pytest.raises(FileError) as raised:
        parse_yaml(text, "text")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_error_of_invalid_json_is_one_line() -> None:
    for text in ("{", "[" * 10**6, "9" * 5000):
        with pytest.raises(FileError, match=r"^text: is "):
            parse_json(text, "text")


def test_values_in_errors_are_short() -> None:
    deep: Any = 0
    for _ in range(5000):
        deep = {"a": [deep, deep]}
    for value in ("x" * 10**6, list(range(10**5)), deep, 16**5000, {"k" * 10**5: "v" * 10**5}):
        assert len(brief(value)) < 1000
    assert brief({"a": 1}) == "{'a': 1}"


def test_written_text_is_read_back_and_a_missing_folder_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "x.txt", "µ\n")
    assert read_text(tmp_path / "x.txt") == "µ\n"
    with pytest.raises(
        FileError, match=r"nowhere/x.txt: can't be written \(No such file or directory\)"
    ):
        write_text(tmp_path / "nowhere/x.txt", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_file_keeps_its_former_contents(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupted() -> None:
        with replacing(path) as partial:
            assert partial.suffix == ".svg"
            partial.write_text("half")
            raise error

    path = tmp_path / "x.svg"
    write_text(path, "former")
    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_figure_keeps_the_former_one(tmp_path: Path) -> None:
    class Interrupted(Figure):
        def savefig(self, fname: Any, **_: Any) -> None:
            Path(fname).write_text("half")
            raise KeyboardInterrupt

    path = tmp_path / "x.svg"
    save_figure(Figure(), path)
    former = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        save_figure(Interrupted(), path)
    assert path.read_text() == former


@pytest.mark.parametrize("option", ["--gantt", "--trace"])
def test_an_output_that_can_not_be_written_is_refused_before_the_simulation(
    option: str, tmp_path: Path
) -> None:
    save_program(PROGRAM, tmp_path / "step.json")
    for output, why in (("nowhere/x.svg", "there is no folder"), ("", "it is a folder")):
        arguments = ["simulate", str(tmp_path / "step.json"), option, str(tmp_path / output)]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert why in " ".join(result.output.split())


def test_a_profile_or_report_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows = [
        "gpu,kind,size,bytes,us",
        *(f"toy,all_reduce,{n},{b},{b / 100 + n}" for n in (2, 4) for b in (1e3, 1e5, 1e7)),
    ]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    for arguments in (
        ["fit-profiles", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "nowhere/x.yaml")],
        ["validate", "korthikanti-figure1", "--output", str(tmp_path / "file")],
    ):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert "can't be written" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("toy,all_reduce,two,1,1", "row 1: size is 'two'; expected a number of 2 to"),
        (
            "toy,all_reduce,2,1,1\ntoy,all_reduce,2,1,-1",
            "row 2: us is -1; expected a number of 1e-06 to",
        ),
        ("toy,all_reduce,2,1,inf", "row 1: us is inf"),
        ("toy,all_reduce,2.5,1,1", "row 1: size is 2.5; expected a whole number of devices"),
        ("toy,all_reduce,2,1,1\n,all_reduce,2,1,1", "row 2: gpu is empty; expected a name"),
        ("toy,all_gather,2,1,1\n" * 9, "no rows of all_reduce, only of all_gather"),
    ],
)
def test_a_table_of_collectives_with_wrong_numbers_is_refused(
    rows: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(f"gpu,kind,size,bytes,us\n{rows}\n")
    result = CliRunner().invoke(
        app, ["fit-profiles", str(tmp_path / "rows.csv")], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_name_of_a_device_may_be_a_number(tmp_path: Path) -> None:
    rows = (f"4090,all_reduce,{n},{size},{size / 100 + n}" for n in (2, 4) for size in (1, 9, 99))
    table, profile = tmp_path / "rows.csv", tmp_path / "rows.yaml"
    table.write_text("\n".join(["gpu,kind,size,bytes,us", *rows]))
    assert CliRunner().invoke(app, ["fit-profiles", str(table)]).exit_code == 0
    assert read_yaml(profile)["gpu"] == "4090"
