"""`grad` and `value_and_grad` of functions in layers, and the marks of accumulated values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
from jax.extend.core import Primitive

from autopar.layering.layered_functions import layered_by_context
from autopar.primitives import PrimitiveRecord, register

accumulate_p = Primitive("accumulate")
"""Identity on values that are accumulated over microbatches.

`autopar.microbatch.body_boundary` marks them in traced steps.
"""
accumulate_p.multiple_results = True
accumulate_p.def_abstract_eval(lambda *avals: avals)
register(accumulate_p, PrimitiveRecord(movement="identity", algebra="linear"))

_whole_arrays: ContextVar[bool] = ContextVar("whole_arrays", default=False)


@contextmanager
def tracing_whole_arrays() -> Iterator[None]:
    """Trace steps as functions of whole arrays, to analyze how values depend on single examples."""
    token = _whole_arrays.set(True)
    try:
        yield
    finally:
        _whole_arrays.reset(token)


def traces_whole_arrays() -> bool:
    """Return whether code on shards is to be traced as a function of whole arrays.

    The body of a `shard_map` hides which results depend on which examples.
    """
    return _whole_arrays.get()


def value_and_grad(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Differentiate `fun` as `jax.value_and_grad` does, in layers if the step is a pipeline.

    The method of parallelization says how to divide `fun` into layers, which make up the stages.
    Elsewhere it is `jax.value_and_grad`.

    Args:
        fun: the function to differentiate.
        *args: further arguments of `jax.value_and_grad`.
        **kwargs: keyword arguments of `jax.value_and_grad`.

    Returns:
        The function that `jax.value_and_grad` returns for these arguments.
    """
    options = args, kwargs
    argnums = args[0] if args else kwargs.get("argnums", 0)

    @wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        in_layers = layered_by_context(fun, argnums)
        return jax.value_and_grad(in_layers, *options[0], **options[1])(*args, **kwargs)

    return differentiated


def grad(
    fun: Callable[..., Any], *args: Any, has_aux: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Differentiate `fun` as `jax.grad` does, in layers if the step is a pipeline.

    Args:
        fun: the function to differentiate.
        *args: further arguments of `jax.grad`.
        has_aux: whether `fun` returns a pair of its value and auxiliary values.
        **kwargs: further keyword arguments of `jax.grad`.

    Returns:
        The function that `jax.grad` returns for these arguments.
    """
    differentiated = value_and_grad(fun, *args, has_aux=has_aux, **kwargs)

    @wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient
