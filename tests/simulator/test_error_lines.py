"""Errors of a command line are one line with an exit code; warnings follow the output."""

import errno
import os
import warnings

import pytest
import typer
from typer.testing import CliRunner, Result

from simulator.cli.error_lines import OneLineErrors, usage_errors, with_debug

app = typer.Typer(name="toy", cls=OneLineErrors, add_completion=False)
app.callback()(with_debug)


@app.command()
def succeed() -> None:
    """Print and warn."""
    warnings.warn("of\nthis", stacklevel=1)
    typer.echo("done")


@app.command()
def refuse(count: int = 0) -> None:
    """Raise an error for users."""
    with usage_errors():
        raise ValueError(f"{count} is\nnot enough")


@app.command()
def fail() -> None:
    """Raise an error that no input should cause."""
    raise KeyError("a defect")


@app.command()
def fill() -> None:
    """Write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@app.command()
def answer() -> None:
    """Answer no."""
    raise typer.Exit(1)


@app.command()
def interrupt() -> None:
    """Be interrupted."""
    raise KeyboardInterrupt


def run(*arguments: str, code: int) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result


@pytest.mark.filterwarnings("always")
def test_warnings_are_a_line_each_after_the_output() -> None:
    result = run("succeed", code=0)
    assert result.stdout == "done\n"
    assert result.stderr == "warning: of this\n"


def test_an_error_for_users_is_one_line() -> None:
    result = run("refuse", "--count", "3", code=2)
    assert (result.stdout, result.stderr) == ("", "toy refuse: 3 is not enough\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("refuse", "--count", "x"), "toy refuse: Invalid value for '--count': "),
        (("refuse", "--cuont", "1"), "toy refuse: No such option: --cuont (Possible options: --c"),
        (
            ("refuse", "1"),
            "toy refuse: Got unexpected extra argument(s) (1); see toy refuse --help",
        ),
        (("refse",), "toy: No such command 'refse'. Did you mean 'refuse'?; see toy --help"),
        (("--cuont",), "toy: No such option: --cuont"),
    ],
)
def test_the_error_of_invalid_arguments_is_one_line_that_names_the_help(arguments, line) -> None:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--debug", "refuse"), ("refuse", "--debug")])
def test_debug_adds_the_traceback(arguments) -> None:
    lines = run(*arguments, code=2).stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert '    raise ValueError(f"{count} is\\nnot enough")' in lines
    assert lines[-1] == "toy refuse: 0 is not enough"


def test_an_environment_variable_adds_the_traceback(monkeypatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    assert run("refuse", code=2).stderr.startswith("Traceback")


def test_a_defect_is_reported_with_its_traceback_and_exit_code_3() -> None:
    lines = run("fail", code=3).stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("'a defect'. This is a defect of autopar")


def test_an_error_of_the_operating_system_is_one_line() -> None:
    assert run("fill", code=2).stderr == "toy: [Errno 28] No space left on device\n"


def test_exit_codes_of_answers_interrupts_and_help() -> None:
    assert run("answer", code=1).output == ""
    run("interrupt", code=130)
    assert "Usage: toy" in run(code=0).stdout
    assert "--debug" in run("--help", code=0).stdout
