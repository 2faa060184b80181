"""The arguments of a step: which are static, which are donated, and which are the batch."""

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from autopar.checks import AllowedValues, OptionError, integer, items, one_of
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

type BatchArgnums = Literal["auto"] | int | Sequence[int] | Mapping[int, int]


def _batch_dims(argnums: Any) -> Mapping[int, int]:
    """Return a checked mapping from numbers of arguments to batch dims."""
    if not isinstance(argnums, Mapping):
        raise TypeError
    numbers = ARGNUMS.take(tuple(argnums))
    return dict(zip(numbers, ARGNUMS.take(tuple(argnums.values())), strict=True))


BATCH_ARGNUMS = (
    one_of("auto")
    | AllowedValues("a mapping from the number of an argument to its batch dim", _batch_dims)
    | ARGNUMS
)
"""The check of `batch_argnums`, which returns "auto", a tuple or a mapping."""

_MANY_VALUES = 3
"""The number of values of a Python number for which a step is compiled before a warning."""


def dynamic_arguments(args: Sequence[Any], static: Sequence[int]) -> Sequence[Any]:
    """Return the arguments that are not static."""
    return [arg for i, arg in enumerate(args) if i not in static] if static else args


def static_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the static arguments.

    "auto" selects numbers, strings, and arguments without arrays that hold something else.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_static(arg))
    return _as_tuple(argnums, len(args), "static_argnums")


def donated_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the numbers of the donated arguments; "auto" selects Flax's TrainStates.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_train_state(arg))
    return _as_tuple(argnums, len(args), "donate_argnums")


def batch_arguments(
    argnums: BatchArgnums, args: Sequence[Any], result: Callable[[], Any]
) -> tuple[int, ...]:
    """Return the numbers of the arguments whose arrays have the batch as a dim.

    "auto" selects by shapes. The first argument is the model. Those arguments after it are the
    batch whose arrays all have the same first dim; if it differs between arguments, the first dim
    that most arrays have decides. An argument with several arrays whose shapes the model has, such
    as a second copy of the weights, is only selected if no other can be. If no argument has a
    single first dim, the batch is the last argument with arrays, such as a graph with nodes and
    edges. Where these rules leave a choice and the step returns a state of several arrays,
    arguments that it returns are not the batch, and the first argument may be.

    Args:
        argnums: the option.
        args: the arguments of the step; nnx modules in them are packed.
        result: returns the result of the step, arrays or ShapeDtypeStructs.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if argnums == "auto":
        return _batch_by_shapes(args, result)
    numbers = tuple(argnums) if isinstance(argnums, Mapping) else argnums
    return _as_tuple(numbers, len(args), "batch_argnums")


def _batch_by_shapes(args: Sequence[Any], result: Callable[[], Any]) -> tuple[int, ...]:
    shapes = {i: arrays for i, arg in enumerate(args) if (arrays := _array_shapes(arg))}
    model = set(shapes.get(0, ()))
    copies = {i for i, arrays in shapes.items() if i and arrays[1:] and set(arrays) <= model}
    possible = shapes.keys() - {0}
    possible = possible - copies or possible
    rows = _arrays_by_first_dim(shapes, possible)
    if len(rows) != 1 or rows.keys() == _first_dims(shapes.get(0, [])):
        returned = _returned_arguments(args, result)
        others = shapes.keys() - copies - returned
        # without a state of several arrays, what is returned may be a prediction for the batch
        if others and any(arrays[1:] for i, arrays in shapes.items() if i in returned):
            possible = others
            rows = _arrays_by_first_dim(shapes, possible)
    if not rows:
        return (max(possible),) if possible else ()
    [(examples, _)] = rows.most_common(1)
    return tuple(i for i in sorted(possible) if _first_dims(shapes[i]) == {examples})


type _Shapes = Sequence[tuple[tuple[int, ...], Any]]


def _first_dims(arrays: _Shapes) -> set[int]:
    return {shape[0] for shape, _ in arrays}


def _arrays_by_first_dim(shapes: Mapping[int, _Shapes], numbers: Set[int]) -> Counter[int]:
    """Return the number of arrays by first dim, of the arguments that have a single one."""
    arrays = [shapes[i] for i in sorted(numbers) if len(_first_dims(shapes[i])) == 1]
    return Counter(shape[0] for each in arrays for shape, _ in each)


def _returned_arguments(args: Sequence[Any], result: Callable[[], Any]) -> set[int]:
    """Return the numbers of the arguments whose arrays stand side by side in the result.

    There are none if the step raises; its trace will say why.
    """
    try:
        returned = _signature(result())
    except Exception:
        return set()
    numbers = set()
    for i, arg in enumerate(args):
        arrays = _signature(arg)
        starts = range(len(returned) - len(arrays) + 1)
        if arrays and any(returned[k : k + len(arrays)] == arrays for k in starts):
            numbers.add(i)
    return numbers


def _signature(tree: Any) -> _Shapes:
    """Return shape and dtype of all arrays in a pytree."""
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree) if isinstance(leaf, ARRAYS)]


def result_shapes(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return the result of a step as ShapeDtypeStructs, without running it."""
    shapes = [
        jax.tree.map(
            lambda leaf: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, ARRAYS) else leaf
            ),
            arg,
        )
        for arg in args
    ]
    return jax.eval_shape(fun, *shapes)


def _array_shapes(arg: Any) -> _Shapes:
    """Return shape and dtype of the arrays of an argument that have dims; random keys have none."""
    arrays = (leaf for leaf in jax.tree.leaves(arg) if isinstance(leaf, ARRAYS))
    return [
        (leaf.shape, leaf.dtype)
        for leaf in arrays
        if leaf.ndim and (leaf.shape, leaf.dtype) != ((2,), np.uint32)
    ]


def batch_dims(argnums: BatchArgnums, args: Sequence[Any]) -> dict[int, int]:
    """Return the dim that is the batch, by number of argument, where it is not the first.

    Raises:
        OptionError: A number is not that of an argument.
    """
    if not isinstance(argnums, Mapping):
        return {}
    _as_tuple(tuple(argnums), len(args), "batch_argnums")
    return {i % len(args): dim for i, dim in argnums.items() if dim}


def positional_arguments(
    fun: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call by position: keyword-only ones follow all others.

    Raises:
        TypeError: They do not fit the parameters of `fun`.
    """
    bound = inspect.signature(fun).bind(*args, **keywords)
    bound.apply_defaults()
    names, step = _keyword_only(fun), getattr(fun, "__name__", "the step")
    if extra := [name for name in bound.kwargs if name not in names]:
        raise TypeError(
            f"{step} takes {', '.join(extra)} by **; name them as parameters, as a step is planned"
            " for a fixed number of arguments"
        )
    if _has_any_number(fun):
        if named := [name for name in names if name in keywords]:
            raise TypeError(
                f"{step} takes {', '.join(named)} by name after any number of arguments (*); bind"
                f" {named[0]} with functools.partial, or name the other parameters, too"
            )
        return bound.args
    return (*bound.args, *(bound.kwargs[name] for name in names))


def by_position(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun` with keyword-only parameters by position, after all others.

    After any number of arguments (`*args`) none can follow: they keep their defaults.
    """
    names = _keyword_only(fun)
    if not names or _has_any_number(fun):
        return fun
    kinds = [parameter.kind for parameter in inspect.signature(fun).parameters.values()]
    count = sum(kind in _POSITIONAL for kind in kinds)

    def positional(*args: Any) -> Any:
        return fun(*args[:count], **dict(zip(names, args[count:], strict=False)))

    return wraps(fun)(positional)


def _keyword_only(fun: Callable[..., Any]) -> list[str]:
    """Return the names of keyword-only parameters; none if there is no signature."""
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return []
    return [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]


def _has_any_number(fun: Callable[..., Any]) -> bool:
    """Return whether a function with a signature takes `*args`."""
    parameters = inspect.signature(fun).parameters.values()
    return any(each.kind is each.VAR_POSITIONAL for each in parameters)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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

    Unlike the values, the keys of 1, 1.0 and True differ, as do the keys of 0.0 and -0.0. All nans
    have one key. The key of a tuple or dataclass contains the keys of its items or fields.
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
        self._values: dict[str, dict[Hashable, Any]] = {}

    def add(self, i: int, value: Any, path: str = "") -> None:
        """Record that the step is compiled for a value, and warn after several.

        Args:
            i: the number of the argument.
            value: the argument, or a constant inside of it.
            path: the path of the constant inside of the argument, such as ".count".
        """
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            return
        values = self._values.setdefault(f"{i}{path}", {})
        if len(values) == _MANY_VALUES:
            return
        values[static_key(value)] = value
        if len(values) < _MANY_VALUES:
            return
        name = self._name_of(i)
        where = f"{path} of argument {i}" if path else f"argument {i}"
        static = f", or pass static_argnums={i} to compile a program for each value"
        warnings.warn(
            f"{where}{f' ({name})' if name else ''} has been"
            f" {', '.join(map(repr, values.values()))}, and the step was planned and compiled"
            " for each: a Python number is a constant of the step. Pass an array if it changes,"
            f" jnp.asarray({(name or '...') + path}) for instance{'' if path else static}",
            stacklevel=4,
        )

    def _name_of(self, i: int) -> str:
        try:
            names = list(inspect.signature(self._fun).parameters)
        except (TypeError, ValueError):
            return ""
        return names[i] if i < len(names) else ""


def _is_static(arg: Any) -> bool:
    if _is_train_state(arg):
        return False
    if isinstance(arg, (*NUMBERS, str)):
        return True
    return _others(arg) and not any(isinstance(leaf, ARRAYS) for leaf in jax.tree.leaves(arg))


def _others(arg: Any) -> bool:
    """Return whether a leaf of `arg` is neither an array nor a number."""
    return any(not isinstance(leaf, (*ARRAYS, *NUMBERS)) for leaf in jax.tree.leaves(arg))


NUMBERS = (bool, int, float, complex)
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, ArrayHandle)


def leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> frozenset[int]:
    """Return the numbers of the leaves of arguments `argnums` among all leaves of `args`."""
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return frozenset(leaf for leaf, i in enumerate(owner) if i in argnums)
