"""Descriptions in YAML files, and errors about them that say which file, which field, what was given and what is expected."""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from annotated_types import Gt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from simulator.files import brief, one_line, read_yaml

_LEAST, _MOST = 1e-15, 1e15
_SHOWN = 10  # errors of one description

RENAMED: Mapping[str, str] = {
    "at_once": "concurrent_instructions",
    "droop": "throttling",
    "hot_in_training": "throttles_in_training",
    "permute": "collective_permute",
    "slowdown": "contention_factor",
    "split_us": "split_k_us",
    "whole_waves": "wave_quantization",
}
"""New names of fields that had other names in earlier versions, by the old name. Errors about an unknown field name the new one."""

Fraction = Annotated[float, Field(gt=0, le=1)]


class ClusterError(ValueError):
    """A cluster or device description that can't be used; says which file, which field and what is expected."""


class Description(BaseModel):
    """A part of a description: unknown fields and wrong types are errors, and nothing changes once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _numbers_are_in_range(self) -> Self:
        """Refuse numbers that no hardware or model has, with which predictions would overflow."""
        for name, (least, least_inside) in _least(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, dict):
                for key, number in value.items():
                    _check_range(f"{name}.{key}", number, least_inside)
            else:
                _check_range(name, value, least)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, checked as those in a file are."""
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        return validate(
            type(self), {**self.fields(), **update}, getattr(self, "name", type(self).__name__)
        )

    def fields(self) -> dict[str, Any]:
        """Return its fields by name, without what is computed of them."""
        return {name: getattr(self, name) for name in type(self).model_fields}


@cache
def _least(description: type[Description]) -> dict[str, tuple[float, float]]:
    """For each field the least that a number may be, and one in a dict."""

    def least(bounds: Iterable[Any]) -> float:
        return _LEAST if any(isinstance(bound, Gt) for bound in bounds) else 0.0

    return {
        name: (
            least(kind.metadata),
            least(getattr((get_args(kind.annotation) or (None,))[-1], "__metadata__", ())),
        )
        for name, kind in description.model_fields.items()
    }


def _check_range(field: str, number: Any, least: float) -> None:
    if isinstance(number, int | float) and not least <= abs(number) <= _MOST:
        raise ValueError(f"{field}: given {brief(number)}; expected {least:g} to {_MOST:g}")


def read(path: Path) -> dict[str, Any]:
    """The fields in a YAML file."""
    data = read_yaml(path, error=ClusterError)
    if not isinstance(data, dict) or not all(isinstance(field, str) for field in data):
        raise ClusterError(f"{path}: given {brief(data)}, expected fields with their values")
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
            f"{beside}: {field}: unknown profile {brief(name)}; expected one of {', '.join(shipped)}, a path to a .yaml file, or the "
            "fields themselves"
        )
    return read(shipped.get(name) or beside.parent / name)


def validate[D: Description](kind: type[D], data: Mapping[str, Any], source: object) -> D:
    """`data` as a description of that kind; `source` is what errors call it, e.g. its path."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
    lines = [f"{source}: {one_line(_explain(kind, details))}" for details in errors[:_SHOWN]]
    if more := len(errors) - len(lines):
        lines.append(f"{source}: {more} more")
    raise ClusterError("\n".join(lines))


def _explain(kind: type[Description], error: ErrorDetails) -> str:
    """One line for one error of pydantic."""
    field = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            annotation = (
                _section(kind, error["loc"][:-1]).model_fields[str(error["loc"][-1])].annotation
            )
            return f"{field}: missing; expected {_describe(annotation)}"
        case "extra_forbidden":
            valid = list(_section(kind, error["loc"][:-1]).model_fields)
            hint = _hint(str(error["loc"][-1]), valid)
            return f"{field}: unknown field (given {brief(error['input'])}); {hint}valid: {', '.join(valid)}"
        case "value_error":  # from a check over several fields, which says everything itself
            problem = error["msg"].removeprefix("Value error, ")
            return f"{field}.{problem}" if field else problem
        case _:
            return f"{field}: given {brief(error['input'])}; {error['msg'].replace('Input should be', 'expected')}"


def _hint(field: str, valid: Sequence[str]) -> str:
    """Return what to write instead of an unknown field; empty if no valid one is like it."""
    if (new := RENAMED.get(field)) in valid:
        return f"it is called {new!r} now; "
    close = difflib.get_close_matches(field, valid, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _section(kind: type[Description], path: tuple[int | str, ...]) -> type[Description]:
    """The description that the fields `path` of `kind` lead to."""
    for field in path:
        kind = next(
            option
            for option in _options(kind.model_fields[str(field)].annotation)
            if _is_description(option)
        )
    return kind


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _is_description(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Description)


def _describe(annotation: Any) -> str:
    if _is_description(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    return {str: "a text", float: "a number", int: "a whole number"}.get(
        annotation, "a mapping of names to numbers"
    )
