"""The base class of sections in YAML files, and errors that name the file and the field.

An error also says what was given and what is expected.
"""

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from annotated_types import Gt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from simulator.files import brief, one_line, read_yaml

_LEAST = 1e-15
_MOST = 1e15
"""Smallest positive and largest number in a description; predictions would overflow beyond."""

_MAX_ERRORS = 10
"""Errors of one description that are shown; the rest is counted."""

RENAMED: Mapping[str, str] = {
    "at_once": "concurrent_instructions",
    "droop": "throttling",
    "hot_in_training": "throttles_in_training",
    "permute": "collective_permute",
    "slowdown": "contention_factor",
    "split_us": "split_k_us",
    "whole_waves": "wave_quantization",
}
"""Present names of fields by their former ones; an error about a former name states both."""

_EXPECTED_TYPES: Mapping[str, str] = {
    "bool_type": "expected true or false",
    "float_type": "expected a number",
    "int_type": "expected a whole number",
    "string_type": "expected a text",
}
"""What errors say about values of another type, by pydantic's name of the error."""

Fraction = Annotated[float, Field(gt=0, le=1)]


class ClusterError(ValueError):
    """A description of a cluster, a device or a scenario that can't be used."""


class Description(BaseModel):
    """A section of a YAML file: frozen, without unknown fields, of strict types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _numbers_are_in_range(self) -> Self:
        """Refuse numbers so large or small that predictions would overflow."""
        for name, (lowest, lowest_inside) in _lower_bounds(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, dict):
                for key, number in value.items():
                    _check_range(f"{name}.{key}", number, lowest_inside)
            else:
                _check_range(name, value, lowest)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, which are validated like the fields of a file."""
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        return validate(
            type(self), {**self.fields(), **update}, getattr(self, "name", type(self).__name__)
        )

    def fields(self) -> dict[str, Any]:
        """Return the declared fields by name, without cached properties."""
        return {name: getattr(self, name) for name in type(self).model_fields}


@cache
def _lower_bounds(description: type[Description]) -> dict[str, tuple[float, float]]:
    """Return the smallest magnitude of each field's number, and of the numbers in its dict."""

    def lower_bound(bounds: Iterable[Any]) -> float:
        return _LEAST if any(isinstance(bound, Gt) for bound in bounds) else 0.0

    return {
        name: (
            lower_bound(kind.metadata),
            lower_bound(getattr((get_args(kind.annotation) or (None,))[-1], "__metadata__", ())),
        )
        for name, kind in description.model_fields.items()
    }


def _check_range(field: str, number: Any, lowest: float) -> None:
    if isinstance(number, int | float) and not lowest <= abs(number) <= _MOST:
        raise ValueError(f"{field}: given {brief(number)}; expected {lowest:g} to {_MOST:g}")


def read(path: Path) -> dict[str, Any]:
    """Return the fields in a YAML file.

    Raises:
        ClusterError: the file can't be read, or is no mapping of texts to values.
    """
    data = read_yaml(path, error=ClusterError)
    if not isinstance(data, dict) or not all(isinstance(field, str) for field in data):
        raise ClusterError(f"{path}: given {brief(data)}, expected fields with their values")
    return data


def resolve_reference(name: object, folder: Path, beside: Path, field: str) -> object:
    """Return the fields that a name or a path refers to.

    Args:
        name: the stem of a file in `folder`, a path relative to the file `beside`, or the fields
            themselves, which are returned unchanged.
        folder: the folder of the shipped profiles.
        beside: the file that contains the reference.
        field: the field with the reference, for errors.

    Raises:
        ClusterError: there is no such profile.
    """
    if not isinstance(name, str):
        return name
    shipped = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if name not in shipped and not name.endswith((".yaml", ".yml")):
        raise ClusterError(
            f"{beside}: {field}: unknown profile {brief(name)}; expected one of "
            f"{', '.join(shipped)}, a path to a .yaml file, or the fields themselves"
        )
    return read(shipped.get(name) or beside.parent / name)


def validate[D: Description](kind: type[D], data: Mapping[str, Any], source: object) -> D:
    """Return `data` as a description of a kind.

    Args:
        kind: the class of the description.
        data: the fields.
        source: what errors call the description, e.g. its path.

    Raises:
        ClusterError: fields are missing, unknown or wrong; the first ten are numbered.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
    problems = [one_line(_explain(kind, details)) for details in errors[:_MAX_ERRORS]]
    if len(errors) == 1:
        raise ClusterError(f"{source}: {problems[0]}")
    if more := len(errors) - len(problems):
        problems.append(f"{more} more")
    numbered = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
    raise ClusterError(f"{source}: {len(errors)} errors: {numbered}")


def _explain(kind: type[Description], error: ErrorDetails) -> str:
    """Return what an error of pydantic means, as one line."""
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
            return (
                f"{field}: unknown field (given {brief(error['input'])}); "
                f"{hint}valid: {', '.join(valid)}"
            )
        case "value_error":  # from a check over several fields, whose message is complete
            problem = error["msg"].removeprefix("Value error, ")
            return f"{field}.{problem}" if field else problem
        case "model_type":
            expected = f"expected {_describe(_section(kind, error['loc']))}"
        case mismatch:
            default = error["msg"].replace("Input should be", "expected")
            expected = _EXPECTED_TYPES.get(mismatch, default)
    return f"{field}: given {brief(error['input'])}; {expected}"


def _hint(field: str, valid: Sequence[str]) -> str:
    """Return a hint at the valid field that an unknown one stands for; empty if there is none."""
    if (new := RENAMED.get(field)) in valid:
        return f"it is called {new!r} now; "
    close = difflib.get_close_matches(field, valid, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _section(kind: type[Description], path: tuple[int | str, ...]) -> type[Description]:
    """Return the class of the section at `path` inside a description."""
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
    """Return what a field expects, in words."""
    if _is_description(annotation):
        return f"a section with {', '.join(annotation.model_fields)}"
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    return {str: "a text", float: "a number", int: "a whole number"}.get(
        annotation, "a mapping of names to numbers"
    )
