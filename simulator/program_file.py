"""Program files: JSON with all that a simulation needs, on another machine than the compiler's."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from simulator.files import brief, one_line, parse_json, read_text, write_text
from simulator.program import Program

VERSION = 2
"""The format of the files: 2 since collectives include `collective_permute`, and kernels have the
fields `unmodelled` and `phase`."""


class ProgramError(ValueError):
    """A file without a readable program."""


class _File(BaseModel):
    """The contents of a program file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[2] = VERSION
    program: Program


def save_program(program: Program, path: str | Path) -> None:
    """Write `program` as JSON: instructions, bodies, memory."""
    write_text(path, _File(program=program).model_dump_json())


def load_program(path: str | Path) -> Program:
    """Read a program that `save_program` wrote.

    Raises:
        ProgramError: the file is something else. The text says what is wrong, and where.
    """
    text = read_text(path, "a program that save_program wrote", ProgramError)
    try:
        return _File.model_validate_json(text).program
    except RecursionError:
        raise ProgramError(
            f"{path}: is nested too deeply; expected a program that save_program wrote"
        ) from None
    except ValidationError as error:
        if problem := _of_plan(text, path) or _of_other_version(text, path):
            raise ProgramError(f"{path}: {problem}") from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ProgramError(
            f"{path}: {one_line(f'{where}: {first["msg"]}')};"
            " expected a program that save_program wrote"
        ) from None


def _of_other_version(text: str, path: str | Path) -> str:
    """Return how to renew a program of another version of the format; empty for any other text."""
    try:
        data = parse_json(text, path)
    except ValueError:
        return ""
    if (
        not isinstance(data, dict)
        or "program" not in data
        or data.get("version", VERSION) == VERSION
    ):
        return ""
    return (
        f"is a program of version {brief(data.get('version'))}, expected {VERSION}; compile it"
        " again (autopar.compile_step) and write it with simulator.save_program"
    )


def _of_plan(text: str, path: str | Path) -> str:
    """Return how to compile a plan of autopar, and what it predicts; empty for any other text."""
    try:
        data = parse_json(text, path)
    except ValueError:
        return ""
    if not isinstance(data, dict) or not {"fingerprint", "stages"} <= data.keys():
        return ""
    step, cluster = data.get("step", "step"), data.get("cluster", "a cluster")
    seconds, num_bytes = data.get("predicted_seconds"), data.get("predicted_bytes")
    estimate = ""
    if isinstance(seconds, int | float) and isinstance(num_bytes, int | float):
        estimate = (
            f" The planner's own estimate of the step on {cluster} is {seconds * 1e3:.4g} ms and"
            f" {num_bytes / 1e9:.3g} GB a device."
        )
    return (
        f"is a plan of autopar for {step!r}, which holds no program; expected one that"
        " save_program wrote. To make it, where the step and the shapes of its arguments are: "
        f'simulator.save_program(autopar.compile_step(step, args, autopar.Plan.load("{path}"), '
        f'"{cluster}", fidelity="analytic"), "step.json") (or fidelity="compiled").{estimate}'
    )
