"""Random keys as arrays of integers, for transfers to other hosts and for checkpoints."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp


def is_key(dtype: Any) -> bool:
    """Return whether `dtype` is one of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@cache
def impl_of(dtype: Any) -> str:
    """Return the name of the implementation of random keys, such as "threefry2x32".

    Raises:
        ValueError: JAX has no name for the implementation, so other processes can't find it.
    """
    impls: list[Any] = []
    jax.eval_shape(
        lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    (impl,) = impls
    if not isinstance(impl, str):
        raise ValueError(
            f"the implementation of random keys of dtype {dtype} has no name that other hosts"
            " know; make keys by one of JAX's, e.g. jax.random.key(0, impl='threefry2x32')"
        )
    return impl


@cache
def key_dtype(impl: str) -> Any:
    """Return the dtype of the random keys of an implementation."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def data_aval(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the aval of the key data of random keys; other avals are returned unchanged."""
    if is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def on_data(
    function: Callable[..., Sequence[Any]], avals: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Return `function` with key data in place of random keys, in arguments and results.

    Args:
        function: a function of arrays that returns arrays.
        avals: the avals of its arguments.
    """
    impls = [impl_of(aval.dtype) if is_key(aval.dtype) else None for aval in avals]

    def run(*data: Any) -> list[Any]:
        operands = (
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(data, impls, strict=True)
        )
        return [
            jax.random.key_data(result) if is_key(result.dtype) else result
            for result in function(*operands)
        ]

    return run
