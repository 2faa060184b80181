"""The arguments of a step: which are constants of it, which it may reuse, and which leaves they have."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.hosts.arrays import DistributedArray

type Argnums = Literal["auto"] | int | Sequence[int]


def without(args: Sequence[Any], static: Sequence[int]) -> Sequence[Any]:
    return [arg for i, arg in enumerate(args) if i not in static] if static else args


def static_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_static(arg))
    return _as_tuple(argnums, len(args))


def donated_arguments(argnums: Argnums, args: Sequence[Any]) -> tuple[int, ...]:
    if argnums == "auto":
        return tuple(i for i, arg in enumerate(args) if _is_train_state(arg))
    return _as_tuple(argnums, len(args))


def _is_train_state(arg: Any) -> bool:
    """Whether it is Flax's `TrainState`, which nobody has without its module."""
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(arg, module.TrainState)


def _as_tuple(argnums: Any, count: int) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if any(not -count <= i < count for i in numbers):
        raise ValueError(f"argnums {numbers} for a step with {count} arguments; count from 0 to {count - 1}")
    return tuple(sorted(i % count for i in numbers))


def check_hashable(i: int, arg: Any) -> None:
    try:
        hash(arg)
    except TypeError as error:
        raise TypeError(
            f"argument {i} holds something that is no array, so it is static, but a {type(arg).__name__} can't be hashed;"
            " pass only arrays in it, or close the step over it"
        ) from error


def _is_static(arg: Any) -> bool:
    if _is_train_state(arg):
        return False
    if isinstance(arg, bool | int | float | complex | str):
        return True
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, DistributedArray, bool, int, float, complex)
    return not all(isinstance(leaf, arrays) for leaf in jax.tree.leaves(arg))


def leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> frozenset[int]:
    """The numbers, among all leaves of `args`, of those of the arguments `argnums`."""
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return frozenset(leaf for leaf, i in enumerate(owner) if i in argnums)
