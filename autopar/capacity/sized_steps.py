"""Functions that make a step of a given size: calling them, and checking what they return."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.checks import NONE, OptionError, checked, short_repr
from autopar.methods import PLANNING_METHOD

STEP_OPTIONS = ("batch_argnums", "donate_argnums", "tokens", "method")
"""The options that a function may return after step and arguments.

`method` is the planning method; the others are options of `autopar.predict`.
"""


@dataclass(frozen=True)
class MadeStep:
    """A step with its arguments and options.

    Attributes:
        fun: the step.
        args: its arguments, arrays or ShapeDtypeStructs.
        options: options by name, some of `STEP_OPTIONS`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def shapes(self) -> tuple[Any, ...]:
        """Return the structure, shapes and dtypes of the arguments."""
        leaves, tree = jax.tree.flatten(self.args)
        return tree, *((getattr(x, "shape", x), getattr(x, "dtype", None)) for x in leaves)


def made_step(make_step: Callable[..., Any], *size: int) -> MadeStep:
    """Return the step that a function makes.

    Args:
        make_step: the function.
        size: what it is called with: a size, or nothing.

    Raises:
        OptionError: it takes other arguments, or returns something else than (step, args) or
            (step, args, options).
    """
    check_takes(make_step, size)
    return checked_step("make_step", make_step(*size))


def checked_step(name: str, made: Any) -> MadeStep:
    """Return what a function returned as a step.

    Args:
        name: the name of the function, for errors.
        made: what it returned.

    Raises:
        OptionError: it is neither (step, args) nor (step, args, options).
    """
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        raise OptionError(
            f"{name} returns {short_repr(made)}; expected (step, args) or (step, args, options)"
        )
    step, args, *rest = made
    if not callable(step) or not isinstance(args, tuple | list):
        raise OptionError(
            f"{name} returns a {type(step).__name__} and a {type(args).__name__}; expected the"
            " step, which is a function, and a tuple of its arguments"
        )
    options = rest[0] if rest else {}
    _check_options(name, options)
    return MadeStep(getattr(step, "fun", step), tuple(args), options)


def check_takes(make_step: object, size: tuple[int, ...]) -> None:
    """Check that a function can be called with a size, or with nothing.

    Raises:
        OptionError: it can't.
    """
    expected = "a function of the size" if size else "a function without required parameters"
    if not callable(make_step):
        raise OptionError(
            f"make_step is {short_repr(make_step)}, expected {expected} that returns (step, args)"
        )
    try:
        signature = inspect.signature(make_step)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*size)
    except TypeError as error:
        raise OptionError(
            f"make_step takes {signature}, expected {expected} that returns (step, args)"
        ) from error


def _check_options(name: str, options: object) -> None:
    """Check the options that a function returns after step and arguments."""
    if not isinstance(options, dict):
        raise OptionError(
            f"{name} returns options {short_repr(options)}; expected a dict of some of"
            f" {', '.join(STEP_OPTIONS)}"
        )
    if unknown := [key for key in options if key not in STEP_OPTIONS]:
        raise OptionError(
            f"{name} returns the option {short_repr(unknown[0])}; expected some of"
            f" {', '.join(STEP_OPTIONS)}"
        )
    checked(f"the method that {name} returns", options.get("method"), NONE | PLANNING_METHOD)
