"""The arguments of a step: which are constants of it, which it may reuse, and which leaves they have."""

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
    lambda given: items(_NUMBER_OF_ARGUMENT, "").take(
        (given,) if isinstance(given, int | np.integer) else given
    ),
)
"""Numbers of arguments, as a tuple."""

AUTO_ARGNUMS = one_of("auto") | ARGNUMS

DEFAULT_BATCH = (1,)
"""The argument that is the batch where the user names none; a step with one argument has no batch then."""

_MANY_VALUES = 3
"""Values of a Python number for which a step is compiled before its user hears of it."""


def dynamic_arguments(args: Sequence[Any], static: Sequence[int]) -> Sequence[Any]:
    return [arg for i, arg in enumerate(args) if i not in static] if static else args


def static_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_static(i, arg))
    return _as_tuple(argnums, len(args), "static_argnums")


def donated_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_train_state(arg))
    return _as_tuple(argnums, len(args), "donate_argnums")


def batch_arguments(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    return (
        ()
        if argnums == DEFAULT_BATCH and len(args) < 2
        else _as_tuple(argnums, len(args), "batch_argnums")
    )


def _is_train_state(arg: Any) -> bool:
    """Whether it is Flax's `TrainState`, which nobody has without its module."""
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
    """Raise TypeError if the arguments of a step that is parallelized are being transformed by JAX."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
        raise TypeError(
            f"{name} is parallelized, so it can't be called under jax.jit, grad, vmap or another transformation, or in another step;"
            f" transform or call {name}.fun, the function it was made of, and parallelize what comes of that"
        )


def check_hashable(i: int, arg: Any) -> None:
    if not is_hashable(arg):
        raise TypeError(
            f"argument {i} is static, by static_argnums or since it holds something that is no array, but a {type(arg).__name__}"
            " can't be hashed; pass only arrays in it, or close the step over it"
        )


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def static_key(value: Any) -> Hashable:
    """Return a key for a static value that differs for 1, 1.0 and True, and for 0.0 and -0.0, which compare equal.

    All nans have one key. The keys of tuples and dataclasses are made of those of their items and fields.
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
        key = (
            type(value),
            value,
            tuple(
                static_key(getattr(value, field.name)) for field in fields(value) if field.compare
            ),
        )
        return key if is_hashable(key) else (type(value), value)
    return type(value), value


class NumberWatch:
    """Warns when a step is compiled for one value after the other of a Python number."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self._values: dict[int, dict[Hashable, Any]] = {}

    def add(self, i: int, value: Any) -> None:
        """Note that the step is compiled for a value of argument `i`."""
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            return
        values = self._values.setdefault(i, {})
        if len(values) == _MANY_VALUES:
            return
        values[static_key(value)] = value
        if len(values) == _MANY_VALUES:
            name = self._name_of(i)
            warnings.warn(
                f"argument {i}{f' ({name})' if name else ''} has been {', '.join(map(repr, values.values()))}, and the step was planned"
                " and compiled for each: a Python number is a constant of the step. Pass an array if it changes,"
                f" jnp.float32({name or '...'}) for instance, or say static_argnums={i} if each value wants a program of its own",
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
        if i not in static and (others := _others(arg)):
            _refuse(i, arg, others[0])


def _others(arg: Any) -> list[tuple[Any, Any]]:
    """The leaves that are neither arrays nor numbers, with their paths."""
    return [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(arg)
        if not isinstance(leaf, (*_ARRAYS, *_NUMBERS))
    ]


def _refuse(i: int, arg: Any, other: tuple[Any, Any]) -> NoReturn:
    path, leaf = other
    raise TypeError(
        f"argument {i}, a {type(arg).__name__}, holds {short_repr(leaf)}{' at ' * bool(path)}{jax.tree_util.keystr(path)}, which is no"
        " array: pass the arrays only, and close the step over the rest (with Equinox by eqx.partition(model, eqx.is_array), and"
        " eqx.combine in the step)"
    )


_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, ArrayHandle)


def leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> frozenset[int]:
    """The numbers, among all leaves of `args`, of those of the arguments `argnums`."""
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return frozenset(leaf for leaf, i in enumerate(owner) if i in argnums)
