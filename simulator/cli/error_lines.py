"""Errors of a command line: one line on stderr, no traceback, and an exit code that has a meaning.

`--debug` anywhere on the command line, or the environment variable AUTOPAR_DEBUG=1, adds the
traceback.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from simulator.files import one_line

NO = 1
"""Exit code when the answer is no: it does not fit, the plans differ, a target is missed."""

BAD_INPUT = 2
"""Exit code of input that cannot be used."""

DEFECT = 3
"""Exit code of an error that no input should cause."""

DEBUG_VARIABLE = "AUTOPAR_DEBUG"
_DEBUG_OPTION = "--debug"


class NegativeAnswer(typer.BadParameter):
    """The answer is no, and nothing is printed but the reason."""

    exit_code = NO


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors for users into usage errors."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(one_line(error)) from error


class OneLineErrors(TyperGroup):
    """A group of subcommands whose errors are one line on stderr.

    Warnings are a line each, too; they follow the output of a subcommand that succeeds.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a subcommand and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        is_debug = _DEBUG_OPTION in given or os.environ.get(DEBUG_VARIABLE) == "1"
        given = [text for text in given if text != _DEBUG_OPTION] or ["--help"]
        try:
            with warnings.catch_warnings(record=True) as caught:
                code = super().main(given, prog_name, complete_var, False, False, **extra)
        except typer.TyperException as error:
            if is_debug:
                traceback.print_exception(error)
            _print_error(_line(error, self.name or ""))
            sys.exit(getattr(error, "exit_code", BAD_INPUT))
        except typer.Abort:
            sys.exit(130)
        except OSError as error:
            if is_debug:
                traceback.print_exception(error)
            _print_error(f"{self.name}: {one_line(error)}")
            sys.exit(BAD_INPUT)
        except Exception as error:
            traceback.print_exception(error)
            _print_error(
                f"{one_line(error) or type(error).__name__}. This is a defect of autopar;"
                " please report the traceback above"
            )
            sys.exit(DEFECT)
        for text in dict.fromkeys(one_line(warning.message) for warning in caught):
            _print_error(f"warning: {text}")
        sys.exit(code if isinstance(code, int) else 0)


Debug = Annotated[
    bool,
    typer.Option(
        _DEBUG_OPTION, envvar=DEBUG_VARIABLE, help="Print the traceback of an error, too."
    ),
]


def with_debug(debug: Debug = False) -> None:
    """Declare `--debug` for the help; `OneLineErrors` reads it, before options are parsed."""


def _line(error: typer.TyperException, name: str) -> str:
    """Return the subcommand and the message of an error, with what to do about it."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else name
    if type(error) in (typer.BadParameter, NegativeAnswer) and not getattr(error, "param", None):
        text = str(getattr(error, "message", error))
    else:
        message = getattr(error, "format_message", error.__str__)()
        text = f"{message.rstrip('.')}; see {command} --help"
    return f"{command}: {one_line(text)}"


def _print_error(line: str) -> None:
    typer.echo(line, err=True)
