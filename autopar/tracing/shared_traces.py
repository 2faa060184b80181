"""One trace for several uses of a step: planning, predicting and reporting it in one process.

Programs that are equal are compiled once, too.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_values: ContextVar[dict[Hashable, Any] | None] = ContextVar("shared_traces", default=None)


@contextmanager
def shared_traces() -> Iterator[None]:
    """Trace a step once for the same arguments and options while the block runs.

    Inside the block, `plan_step`, `predict`, `simulate`, `compile_step` and reports reuse the trace
    of a function that they get again with arrays of the same shapes, and compile equal programs
    once. As for `jax.jit`, the function must not depend on anything that changes in the meantime.

    Example:
        >>> with autopar.shared_traces():
        ...     plan = autopar.plan_step(train_step, args, cluster="dgx_h100")
        ...     prediction = autopar.predict(train_step, args, plan, "dgx_h100")
    """
    if _values.get() is not None:
        yield
        return
    token = _values.set({})
    try:
        yield
    finally:
        _values.reset(token)


def shared[T](key: Hashable, make: Callable[[], T]) -> T:
    """Return the value that was made for a key in the present `shared_traces`, or make it.

    Args:
        key: the key; a value without a hash shares nothing.
        make: returns the value.
    """
    values = _values.get()
    if values is None:
        return make()
    try:
        is_new = key not in values
    except TypeError:  # no hash
        return make()
    if is_new:
        values[key] = make()
    return values[key]
