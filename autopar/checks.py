"""Check options where they are given: what an option may be, and one line for what it may not."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulator.files import one_line

_LENGTH = 100
"""Characters that a message may spend on a value."""


class OptionError(ValueError, TypeError):
    """An option has a type or a value that it can't have."""


@dataclass(frozen=True, slots=True)
class AllowedValues:
    """The values that an option may have. `a | b` allows those of both.

    Attributes:
        expected: what they are, in words.
        take: returns the value in the form that the program uses. Raises ValueError, TypeError or OverflowError for other values.
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
    options: object, /, error: type[ValueError] = OptionError, **kinds: AllowedValues
) -> None:
    """Check fields of a frozen dataclass, in its `__post_init__`, and set them to the form that the program uses."""
    for name, kind in kinds.items():
        object.__setattr__(options, name, checked(name, getattr(options, name), kind, error))


def checked(
    name: str, value: Any, kind: AllowedValues, error: type[ValueError] = OptionError
) -> Any:
    """`value` in the form that the program uses.

    Raises:
        OptionError: it is not of the kind.
    """
    try:
        return kind.take(value)
    except (ValueError, TypeError, OverflowError):
        raise error(f"{name} is {short_repr(value)}, expected {kind.expected}") from None


def short_repr(value: Any) -> str:
    """`repr(value)` in one line that is not too long."""
    return one_line(repr(value), _LENGTH)


def integer(least: int = 1) -> AllowedValues:
    """Whole numbers, of Python or NumPy, from `least` on; not bools."""

    def take(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError
        return int(value)

    return AllowedValues(f"a whole number of at least {least}", take)


def real(least: float = 0.0, above: float = -math.inf, most: float = math.inf) -> AllowedValues:
    """Numbers, of Python or NumPy, from `least` to `most` and above `above`; neither bools nor nan."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError
        if not (least <= float(value) <= most and float(value) > above):
            raise ValueError
        return float(value)

    limits = f"above {above:g}" if above >= least else f"of at least {least:g}"
    return AllowedValues(f"a {'finite ' if most < math.inf else ''}number {limits}", take)


def one_of(*known: str) -> AllowedValues:
    """Some texts."""

    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError
        return value

    return AllowedValues(
        " or ".join(map(repr, known))
        if len(known) < 3
        else f"one of {', '.join(map(repr, known))}",
        take,
    )


def instance(expected: str, *types: type) -> AllowedValues:
    """Instances of any of the types."""

    def take(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return AllowedValues(expected, take)


def satisfying(expected: str, holds: Callable[[Any], bool]) -> AllowedValues:
    """Values for which `holds`."""

    def take(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return AllowedValues(expected, take)


def items(
    kind: AllowedValues, expected: str, least: int = 0, most: int | None = None
) -> AllowedValues:
    """Lists, tuples, ranges and arrays of `least` to `most` values of one kind, as tuples."""

    def take(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
            raise TypeError
        if not least <= len(value) <= (len(value) if most is None else most):
            raise ValueError
        return tuple(map(kind.take, value))

    return AllowedValues(expected, take)


def by_name(kind: AllowedValues, expected: str) -> AllowedValues:
    """Mappings from texts that are not empty to values of one kind, as dicts."""

    def take(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and name for name in value
        ):
            raise TypeError
        return {name: kind.take(each) for name, each in value.items()}

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
