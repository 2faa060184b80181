"""Programs as files: JSON with all that is needed to simulate them, so that they are made in one place and simulated in another."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from simulator.program import Program


class ProgramError(ValueError):
    """A file that holds no program that can be read."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    program: Program


def save_program(program: Program, path: str | Path) -> None:
    """Write `program` as JSON: instructions, bodies, memory."""
    Path(path).write_text(_File(program=program).model_dump_json(), encoding="utf-8")


def load_program(path: str | Path) -> Program:
    """The program that `save_program` wrote; for anything else `ProgramError`, which says what is wrong where."""
    try:
        return _File.model_validate_json(Path(path).read_text(encoding="utf-8")).program
    except OSError as error:
        raise ProgramError(
            f"{path}: can't be read ({error.strerror}); expected a program that save_program wrote"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ProgramError(f"{path}: {where}: {first['msg']}; expected a program that save_program wrote") from None
