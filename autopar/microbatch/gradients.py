"""`grad` and `value_and_grad` that mark their results.

The marks are the values that a step accumulates over microbatches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
from jax.extend.core import Primitive

from autopar.layering.layers import layered_by_context
from autopar.primitives import PrimitiveRecord, register

accumulate_p = Primitive("accumulate")
"""Identity on values that are accumulated over microbatches.

It is in steps that are traced under `marking`, until they are lowered.
"""
accumulate_p.multiple_results = True
accumulate_p.def_abstract_eval(lambda *avals: avals)
register(accumulate_p, PrimitiveRecord(movement="identity", algebra="linear"))

_marking: ContextVar[bool] = ContextVar("marking", default=False)


@contextmanager
def marking() -> Iterator[None]:
    """Make `value_and_grad` mark its results with `accumulate_p`."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


_whole_arrays: ContextVar[bool] = ContextVar("whole_arrays", default=False)


@contextmanager
def tracing_whole_arrays() -> Iterator[None]:
    """Trace steps as functions of whole arrays, to analyse how values depend on single examples."""
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
    """Differentiate `fun` as `jax.value_and_grad` does, in steps that may run in microbatches.

    In a step that is parallelized with `num_micro_batches` > 1, the value, the auxiliary values and
    the gradients are those of the whole batch: sums and means over its examples are computed from
    those of the microbatches. Elsewhere it is `jax.value_and_grad`.

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
    def marked(*args: Any, **kwargs: Any) -> Any:
        in_layers = layered_by_context(fun, argnums)
        differentiated = jax.value_and_grad(in_layers, *options[0], **options[1])
        result = differentiated(*args, **kwargs)
        if not _marking.get():
            return result
        leaves, tree = jax.tree.flatten(result)
        arrays = [k for k, leaf in enumerate(leaves) if not isinstance(leaf, int | float | complex)]
        values = accumulate_p.bind(*(jax.numpy.asarray(leaves[k]) for k in arrays))
        for k, value in zip(arrays, values, strict=True):
            leaves[k] = value
        return jax.tree.unflatten(tree, leaves)

    return marked


def mark_results(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun`, a step without gradients, with all its results marked."""

    @wraps(fun)
    def marked(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(fun(*args))
        inputs = {id(leaf) for leaf in jax.tree.leaves(args)}
        # Inputs are copied, because a mark reads the result of an equation.
        results = [jax.numpy.array(leaf, copy=id(leaf) in inputs) for leaf in leaves]
        return jax.tree.unflatten(tree, accumulate_p.bind(*results) if results else [])

    return marked


def grad(
    fun: Callable[..., Any], *args: Any, has_aux: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Differentiate `fun` as `jax.grad` does, in steps that may run in microbatches.

    Args:
        fun: the function to differentiate.
        *args: further arguments of `jax.grad`.
        has_aux: whether `fun` returns a pair of its value and auxiliary values.
        **kwargs: further keyword arguments of `jax.grad`.

    Returns:
        The function that `jax.grad` returns for these arguments. Its results are those of the whole
        batch, as for `value_and_grad`.
    """
    differentiated = value_and_grad(fun, *args, has_aux=has_aux, **kwargs)

    @wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient
