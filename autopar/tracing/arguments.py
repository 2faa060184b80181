"""The arguments of a step: which are static, which are donated, and which are the batch."""

import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from autopar.checks import AllowedValues, OptionError, integer, items, one_of, short_repr
from autopar.ir.array_handle import ArrayHandle

type Argnums = Literal["auto"] | int | Sequence[int]

_NUMBER_OF_ARGUMENT = integer(-(2**31))
ARGNUMS = AllowedValues(
    "the number of an argument or a sequence of numbers",
    lambda argnums: items(_NUMBER_OF_ARGUMENT, "").take(
        (argnums,) if isinstance(argnums, int | np.integer) else argnums
    ),
)
"""The check of argument numbers, which returns a tuple."""

AUTO_ARGNUMS = one_of("auto") | ARGNUMS

DEFAULT_BATCH = (1,)
"""The batch argument by default. By default a step with a single argument has no batch."""

_MANY_VALUES = 3
"""The number of values of a Python number for which a step is compiled before a warning."""


def dynamic_arguments(args: Sequence[Any], static: Sequence[int]) -> Sequence[Any]:
    """Return the arguments that are not static."""
    return [arg for i, arg in enumerate(args) if i not in static] if static else args


def static_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the static arguments.

    "auto" selects numbers, strings, and arguments that hold anything but arrays and numbers.

    Raises:
        TypeError: With "auto", an argument holds both arrays and something else.
        OptionError: A number is not that of an argument.
    """
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_static(i, arg))
    return _as_tuple(argnums, len(args), "static_argnums")


def donated_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the donated arguments; "auto" selects Flax's TrainStates.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_train_state(arg))
    return _as_tuple(argnums, len(args), "donate_argnums")


def batch_arguments(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the arguments whose arrays have the batch as their first dim.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if argnums == DEFAULT_BATCH and len(args) < 2:
        return ()
    return _as_tuple(argnums, len(args), "batch_argnums")


def _is_train_state(arg: Any) -> bool:
    """Return whether `arg` is Flax's `TrainState`, without an import of Flax."""
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(arg, module.TrainState)


def _as_tuple(argnums: Any, count: int, name: str) -> tuple[int, ...]:
    numbers = ARGNUMS.take(argnums)
    if any(not -count <= i < count for i in numbers):
        raise OptionError(
            f"{name} is {numbers}, but the step has {count} arguments; count from 0 to {count - 1}"
        )
    return tuple(sorted({i % count for i in numbers}))


def check_args(name: str, args: Sequence[Any]) -> None:
    """Raise TypeError if a parallelized step is called with tracers of a JAX transformation."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
        raise TypeError(
            f"{name} is parallelized, so it can't be called under jax.jit, grad, vmap or another"
            f" transformation, or in another step; transform or call {name}.fun, the function that"
            " was parallelized, and parallelize the result"
        )


def check_hashable(i: int, arg: Any) -> None:
    """Raise TypeError if static argument number `i` can't be hashed."""
    if not is_hashable(arg):
        raise TypeError(
            f"argument {i} is static, by static_argnums or because it holds something that is no"
            f" array, but a {type(arg).__name__} can't be hashed; pass only arrays in it, or close"
            " the step over it"
        )


def is_hashable(value: Any) -> bool:
    """Return whether `value` can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def static_key(value: Any) -> Hashable:
    """Return a key of a static value.

    Unlike the values, the keys of 1, 1.0 and True differ, and so do those of 0.0 and -0.0. All nans
    have one key. The keys of tuples and dataclasses contain those of their items and fields.
    """
    match value:
        case float():
            return type(value), value.hex()
        case complex():
            return type(value), value.real.hex(), value.imag.hex()
        case np.generic():
            return type(value), value.dtype, value.tobytes()
        case tuple():
            return type(value), tuple(map(static_key, value))
        case frozenset():
            return type(value), frozenset(map(static_key, value))
    if is_dataclass(value) and not isinstance(value, type):
        compared = (field.name for field in fields(value) if field.compare)
        key = (type(value), value, tuple(static_key(getattr(value, name)) for name in compared))
        return key if is_hashable(key) else (type(value), value)
    return type(value), value


class NumberWatch:
    """A warning for a step that is compiled for one value after another of a Python number."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self._values: dict[int, dict[Hashable, Any]] = {}

    def add(self, i: int, value: Any) -> None:
        """Record that the step is compiled for a value of argument `i`, and warn after several."""
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            return
        values = self._values.setdefault(i, {})
        if len(values) == _MANY_VALUES:
            return
        values[static_key(value)] = value
        if len(values) == _MANY_VALUES:
            name = self._name_of(i)
            warnings.warn(
                f"argument {i}{f' ({name})' if name else ''} has been"
                f" {', '.join(map(repr, values.values()))}, and the step was planned and compiled"
                " for each: a Python number is a constant of the step. Pass an array if it changes,"
                f" jnp.float32({name or '...'}) for instance, or pass static_argnums={i} to compile"
                " a program for each value",
                stacklevel=4,
            )

    def _name_of(self, i: int) -> str:
        try:
            names = list(inspect.signature(self._fun).parameters)
        except (TypeError, ValueError):
            return ""
        return names[i] if i < len(names) else ""


def _is_static(i: int, arg: Any) -> bool:
    if _is_train_state(arg):
        return False
    if isinstance(arg, (*_NUMBERS, str)):
        return True
    others = _others(arg)
    if others and any(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(arg)):
        _refuse(i, arg, others[0])
    return bool(others)


def check_arrays(args: Sequence[Any], static: Sequence[int] = ()) -> None:
    """Raise TypeError unless arguments that are not static hold arrays and numbers only."""
    for i, arg in enumerate(args):
        others = [] if i in static else _others(arg)
        if others:
            _refuse(i, arg, others[0])


def _others(arg: Any) -> list[tuple[Any, Any]]:
    """Return the leaves that are neither arrays nor numbers, with their paths."""
    return [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(arg)
        if not isinstance(leaf, (*_ARRAYS, *_NUMBERS))
    ]


def _refuse(i: int, arg: Any, other: tuple[Any, Any]) -> NoReturn:
    path, leaf = other
    raise TypeError(
        f"argument {i}, a {type(arg).__name__}, holds"
        f" {short_repr(leaf)}{' at ' * bool(path)}{jax.tree_util.keystr(path)}, which is no array:"
        " pass the arrays only, and close the step over the rest (with Equinox by"
        " eqx.partition(model, eqx.is_array), and eqx.combine in the step)"
    )


_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, ArrayHandle)


def leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> frozenset[int]:
    """Return the numbers of the leaves of arguments `argnums` among all leaves of `args`."""
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return frozenset(leaf for leaf, i in enumerate(owner) if i in argnums)
