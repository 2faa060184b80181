"""Timing of functions, the memory of compiled ones, and zeros as dummy inputs for both."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autopar.checks import NONE, checked, integer, real
from autopar.ir.keys import impl_of, is_key
from simulator.memory import MemoryUse

__all__ = ["benchmark_func", "memory_of"]


def benchmark_func(
    run_func: Callable[[], object],
    sync_func: Callable[[], object] | None = None,
    warmup: int = 1,
    repeat: int = 3,
    number: int = 5,
    min_repeat_second: float | None = None,
) -> np.ndarray:
    """Return the seconds of one call of `run_func`, measured several times.

    Args:
        run_func: the function to time.
        sync_func: a function that blocks until the device has finished; called before and after
            each measurement.
        warmup: number of calls before the first measurement.
        repeat: number of measurements.
        number: number of calls in a measurement.
        min_repeat_second: seconds that a measurement takes at least; `number` is raised to suit.

    Returns:
        Array of shape (repeat,): for each measurement the mean seconds of a call.

    Raises:
        OptionError: an option has a type or a value that is not allowed.
    """
    warmup = checked("warmup", warmup, integer(0))
    repeat = checked("repeat", repeat, integer())
    number = checked("number", number, integer())
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


def memory_of(compiled: Any) -> MemoryUse:
    """Return the bytes on one device that a compiled function needs.

    The bytes come from the compiler's buffer assignment.

    Args:
        compiled: a `jax.stages.Compiled`, which `jax.jit(...).lower(...).compile()` returns.
    """
    used = compiled.memory_analysis()
    return MemoryUse(
        arguments=used.argument_size_in_bytes,
        outputs=used.output_size_in_bytes,
        aliased=used.alias_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
    )


def zeros(avals: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Return zeros as dummy inputs, created on their devices; random keys are `key(0)`.

    Args:
        avals: their shapes and dtypes.
        shardings: the sharding of each.
    """

    def make(aval: jax.ShapeDtypeStruct) -> jax.Array:
        if is_key(aval.dtype):
            return jnp.broadcast_to(jax.random.key(0, impl=impl_of(aval.dtype)), aval.shape)
        return jnp.zeros(aval.shape, aval.dtype)

    if not avals:
        return []
    return jax.jit(lambda: [make(aval) for aval in avals], out_shardings=list(shardings))()
