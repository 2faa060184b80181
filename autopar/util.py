"""Timing, and what is timed when nothing else is at hand."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autopar.checks import NONE, checked, integer, real
from autopar.ir.keys import impl_of, is_key


def benchmark_func(
    run_func: Callable[[], object],
    sync_func: Callable[[], object] | None = None,
    warmup: int = 1,
    repeat: int = 3,
    number: int = 5,
    min_repeat_second: float | None = None,
) -> np.ndarray:
    """Seconds of one call of `run_func`, measured `repeat` times as the mean over `number` calls.

    Args:
        sync_func: waits until the device has finished; called before and after each measurement.
        min_repeat_second: raises `number` until one measurement takes at least this long.

    Returns:
        Array of shape (repeat,).
    """
    warmup, repeat, number = (
        checked(name, given, integer(least))
        for name, given, least in (
            ("warmup", warmup, 0),
            ("repeat", repeat, 1),
            ("number", number, 1),
        )
    )
    min_repeat_second = checked("min_repeat_second", min_repeat_second, real() | NONE)
    sync = sync_func or (lambda: None)
    for _ in range(warmup):
        run_func()
    if min_repeat_second:
        number = max(number, int(np.ceil(min_repeat_second / _seconds(run_func, sync, 1))))
    return np.array([_seconds(run_func, sync, number) / number for _ in range(repeat)])


def _seconds(run_func: Callable[[], object], sync: Callable[[], object], number: int) -> float:
    sync()
    start = time.perf_counter()
    for _ in range(number):
        run_func()
    sync()
    return time.perf_counter() - start


def zeros(avals: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Zeros of these shapes and dtypes, made where they go; random keys are all the same key."""

    def make(aval: jax.ShapeDtypeStruct) -> jax.Array:
        if is_key(aval.dtype):
            return jnp.broadcast_to(jax.random.key(0, impl=impl_of(aval.dtype)), aval.shape)
        return jnp.zeros(aval.shape, aval.dtype)

    return (
        jax.jit(lambda: [make(aval) for aval in avals], out_shardings=list(shardings))()
        if avals
        else []
    )
