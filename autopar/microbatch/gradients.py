"""`grad` and `value_and_grad` that say where gradients are complete, so that a step can accumulate them over microbatches."""

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
"""Identity on values that a microbatch contributes to. Only in traced steps, between `marking` and lowering."""
accumulate_p.multiple_results = True
accumulate_p.def_abstract_eval(lambda *avals: avals)
register(accumulate_p, PrimitiveRecord(movement="identity", algebra="linear"))

_marking: ContextVar[bool] = ContextVar("marking", default=False)


@contextmanager
def marking() -> Iterator[None]:
    """While it lasts, `value_and_grad` marks its results with `accumulate_p`."""
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
    """Return whether parts of a step that run on shards are to be traced as functions of whole arrays.

    The body of a `shard_map` hides which results depend on which examples.
    """
    return _whole_arrays.get()


def value_and_grad(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`jax.value_and_grad`, with the same arguments, for steps that may run in microbatches.

    In a step parallelized with `num_micro_batches` > 1 the value, the auxiliary values and the gradients that it returns are
    those of the whole batch: sums and means over examples are put together from the microbatches' own. Anywhere else it
    is `jax.value_and_grad`.
    """
    given = args, kwargs

    @wraps(fun)
    def marked(*args: Any, **kwargs: Any) -> Any:
        result = jax.value_and_grad(layered_by_context(fun), *given[0], **given[1])(*args, **kwargs)
        if not _marking.get():
            return result
        leaves, tree = jax.tree.flatten(result)
        arrays = [k for k, leaf in enumerate(leaves) if not isinstance(leaf, int | float | complex)]
        made = accumulate_p.bind(*(jax.numpy.asarray(leaves[k]) for k in arrays))
        for k, value in zip(arrays, made, strict=True):
            leaves[k] = value
        return jax.tree.unflatten(tree, leaves)

    return marked


def mark_results(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, a step that takes no gradients, with everything that it returns marked."""

    @wraps(fun)
    def marked(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(fun(*args))
        given = {id(leaf) for leaf in jax.tree.leaves(args)}
        made = [
            jax.numpy.array(leaf, copy=id(leaf) in given) for leaf in leaves
        ]  # a result is made by some equation
        return jax.tree.unflatten(tree, accumulate_p.bind(*made) if made else [])

    return marked


def grad(
    fun: Callable[..., Any], *args: Any, has_aux: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """`jax.grad`, with the same arguments, for steps that may run in microbatches; see `value_and_grad`."""
    differentiated = value_and_grad(fun, *args, has_aux=has_aux, **kwargs)

    @wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient
