"""Random keys as the numbers that they consist of: on their way to other hosts, and in checkpoints; keys again where a program reads them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@cache
def impl_of(dtype: Any) -> str:
    """What the keys of a dtype are made by, such as "threefry2x32".

    Raises:
        ValueError: by something that JAX has no name for, so that other processes don't know it.
    """
    found: list[Any] = []
    jax.eval_shape(
        lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    if not isinstance(found[0], str):
        raise ValueError(
            f"random keys of dtype {dtype} are of an implementation that other hosts don't know by name; make them by one of JAX's, e.g."
            " jax.random.key(0, impl='threefry2x32')"
        )
    return found[0]


@cache
def key_dtype(impl: str) -> Any:
    """The dtype of the keys that are made so."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def data_aval(aval: Any) -> jax.ShapeDtypeStruct:
    """The numbers of keys, for keys; what is none as it is."""
    if is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def on_data(
    function: Callable[..., Sequence[Any]], avals: Sequence[Any]
) -> Callable[..., list[Any]]:
    """A function of the numbers of keys, which gives such, for one of arrays with these avals among which are keys."""
    impls = [impl_of(aval.dtype) if is_key(aval.dtype) else None for aval in avals]

    def run(*data: Any) -> list[Any]:
        operands = (
            each if impl is None else jax.random.wrap_key_data(each, impl=impl)
            for each, impl in zip(data, impls, strict=True)
        )
        return [
            jax.random.key_data(each) if is_key(each.dtype) else each
            for each in function(*operands)
        ]

    return run
