"""Descriptions in YAML files, and errors about them that say which file, which field, what was given and what is expected."""

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

Fraction = Annotated[float, Field(gt=0, le=1)]


class ClusterError(ValueError):
    """A cluster or device description that can't be used; says which file, which field and what is expected."""


class Description(BaseModel):
    """A part of a description: unknown fields and wrong types are errors, and nothing changes once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def read(path: Path) -> dict[str, Any]:
    """The fields in a YAML file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"{path}: can't be read ({error.strerror}); expected a YAML file") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path}: is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: given {data!r}, expected fields with their values")
    return data


def named(name: object, folder: Path, beside: Path, field: str) -> object:
    """The fields in a shipped file of `folder`, given its name, or in another, given its path from the file `beside`.

    Anything but a text is returned as it is: the fields themselves.
    """
    if not isinstance(name, str):
        return name
    shipped = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name not in shipped and not name.endswith((".yaml", ".yml")):
        raise ClusterError(
            f"{beside}: {field}: unknown profile {name!r}; expected one of {', '.join(shipped)}, a path to a .yaml file, or the "
            "fields themselves"
        )
    return read(shipped.get(name) or beside.parent / name)


def validate[D: Description](kind: type[D], data: Mapping[str, Any], source: object) -> D:
    """`data` as a description of that kind; `source` is what errors call it, e.g. its path."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [_explain(kind, details) for details in error.errors()]
    raise ClusterError("\n".join(f"{source}: {line}" for line in lines))


def _explain(kind: type[Description], error: ErrorDetails) -> str:
    """One line for one error of pydantic."""
    field = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            annotation = _section(kind, error["loc"][:-1]).model_fields[str(error["loc"][-1])].annotation
            return f"{field}: missing; expected {_describe(annotation)}"
        case "extra_forbidden":
            valid = list(_section(kind, error["loc"][:-1]).model_fields)
            close = difflib.get_close_matches(str(error["loc"][-1]), valid, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            return f"{field}: unknown field (given {error['input']!r}); {hint}valid: {', '.join(valid)}"
        case "value_error":  # from a check over several fields, which says everything itself
            return error["msg"].removeprefix("Value error, ")
        case _:
            return f"{field}: given {error['input']!r}; {error['msg'].replace('Input should be', 'expected')}"


def _section(kind: type[Description], path: tuple[int | str, ...]) -> type[Description]:
    """The description that the fields `path` of `kind` lead to."""
    for field in path:
        kind = next(option for option in _options(kind.model_fields[str(field)].annotation) if _is_description(option))
    return kind


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _is_description(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Description)


def _describe(annotation: Any) -> str:
    if _is_description(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    return {str: "a text", float: "a number", int: "a whole number"}.get(annotation, "a mapping of names to numbers")
