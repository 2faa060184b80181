"""Validation of options: the values that each may have, and the error for all others.

`AllowedValues` combine with `|`, and convert equivalent forms (a NumPy integer, a list) to one.
Every error is one bounded line of the form `NAME is VALUE, expected ...`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulator.files import one_line

_MAX_REPR_CHARACTERS = 100


class OptionError(ValueError, TypeError):
    """An option has a type or a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """The values that an option may have; `a | b` allows the values of both.

    Attributes:
        expected: these values in words, for the error.
        take: a function that returns a value in its normal form, and raises ValueError, TypeError
            or OverflowError for values that are not allowed.
    """

    expected: str
    take: Callable[[Any], Any]

    def __or__(self, other: "AllowedValues") -> "AllowedValues":
        def take(value: Any) -> Any:
            try:
                return self.take(value)
            except (ValueError, TypeError, OverflowError):
                return other.take(value)

        return AllowedValues(f"{self.expected} or {other.expected}", take)


def check(
    options: object, /, error: type[ValueError] = OptionError, **allowed: AllowedValues
) -> None:
    """Check fields of a frozen dataclass in its `__post_init__`, and convert them to normal form.

    Args:
        options: the dataclass.
        error: class of the error for values that are not allowed.
        allowed: for each field to check its allowed values.

    Raises:
        OptionError: a field has a value that is not allowed; or `error`, if given.
    """
    for name, values in allowed.items():
        object.__setattr__(options, name, checked(name, getattr(options, name), values, error))


def checked(
    name: str, value: Any, allowed: AllowedValues, error: type[ValueError] = OptionError
) -> Any:
    """Return an option in normal form.

    Args:
        name: its name, for the error.
        value: its value.
        allowed: its allowed values.
        error: class of the error for values that are not allowed.

    Raises:
        OptionError: the value is not allowed; or `error`, if given.
    """
    try:
        return allowed.take(value)
    except (ValueError, TypeError, OverflowError):
        raise error(f"{name} is {short_repr(value)}, expected {allowed.expected}") from None


def short_repr(value: Any) -> str:
    """Return `repr(value)` in one line of bounded length."""
    return one_line(repr(value), _MAX_REPR_CHARACTERS)


def integer(least: int = 1) -> AllowedValues:
    """Return the integers, of Python or NumPy, that are at least `least`; bools are not allowed."""

    def take(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError
        return int(value)

    return AllowedValues(f"a whole number of at least {least}", take)


def real(above: float = -math.inf, most: float = math.inf) -> AllowedValues:
    """Return the real numbers in [0, most] and above `above`; neither bools nor NaN."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError
        if not (0.0 <= float(value) <= most and float(value) > above):
            raise ValueError
        return float(value)

    limits = f"above {above:g}" if above >= 0.0 else "of at least 0"
    return AllowedValues(f"a {'finite ' if most < math.inf else ''}number {limits}", take)


def one_of(*texts: str) -> AllowedValues:
    """Return the given strings."""

    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in texts:
            raise ValueError
        return value

    if len(texts) < 3:
        return AllowedValues(" or ".join(map(repr, texts)), take)
    return AllowedValues(f"one of {', '.join(map(repr, texts))}", take)


def instance(expected: str, *types: type) -> AllowedValues:
    """Return the instances of any of the types; `expected` names them for the error."""

    def take(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return AllowedValues(expected, take)


def satisfying(expected: str, holds: Callable[[Any], bool]) -> AllowedValues:
    """Return the values for which the predicate `holds`; `expected` names them for the error."""

    def take(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return AllowedValues(expected, take)


def items(
    item: AllowedValues, expected: str, least: int = 0, most: int | None = None
) -> AllowedValues:
    """Return the sequences of `least` to `most` allowed items; their normal form is a tuple."""

    def take(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
            raise TypeError
        if not least <= len(value) <= (len(value) if most is None else most):
            raise ValueError
        return tuple(map(item.take, value))

    return AllowedValues(expected, take)


def by_name(item: AllowedValues, expected: str) -> AllowedValues:
    """Return the mappings of nonempty strings to allowed items; their normal form is a dict."""

    def take(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and name for name in value
        ):
            raise TypeError
        return {name: item.take(entry) for name, entry in value.items()}

    return AllowedValues(expected, take)


NONE = satisfying("None", lambda value: value is None)
FLAG = AllowedValues("True or False", lambda value: bool(instance("", bool, np.bool_).take(value)))
TEXT = satisfying("a text that is not empty", lambda value: isinstance(value, str) and value != "")
PATH = satisfying(
    "a path", lambda value: isinstance(value, Path) or (isinstance(value, str) and value != "")
)
FUNCTION = satisfying("a function", callable)
BYTES = real(above=0.0)
SHAPE = items(integer(), "a mesh shape such as (2, 4)", least=1, most=4)
