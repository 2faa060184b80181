"""Compilation within a memory budget: XLA's limit on memory, lowered where a program exceeds it."""

from typing import Any

import jax

from autopar.devices import Device
from autopar.util import memory_of

_SHARE_OF_MEMORY = 0.8
"""Share of a GPU's memory that XLA:GPU lets a program take by default (jaxlib 0.11.2)."""
_LIMIT = "xla_gpu_memory_limit_slop_factor"
"""XLA's option for the limit, in percent of what arguments and results leave of that share."""
_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
_NO_EARLY_COLLECTIVES = {_SCHEDULER: False, "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""XLA's options with which no collective runs beside other kernels.

Without the scheduler, XLA still starts an asynchronous collective once its operands exist.
"""


def memory_for_programs(device_memory: float) -> float:
    """Return the bytes that XLA lets a program take on a GPU with `device_memory` bytes."""
    return _SHARE_OF_MEMORY * device_memory


def compile_within(
    lowered: jax.stages.Lowered,
    memory_budget: float | None,
    available: float,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a program for GPUs so that it needs no more than a budget, if XLA can.

    XLA's latency-hiding scheduler, which is on for Hopper and later GPUs, starts collectives early
    and so keeps their operands and results longer. It does so while the program needs less than a
    limit, by default most of the device's memory. Above the limit, it places kernels so that they
    need little memory, and XLA recomputes. A program that needs more than the budget is compiled
    again, in this order: with the budget as the limit; by that scheduler with a limit of zero;
    without early collectives; without early collectives and with a limit of zero. None of the four
    needs the least memory for all programs. All are slower, because more of the collectives is
    exposed or because XLA recomputes.

    Args:
        lowered: the program.
        memory_budget: bytes of one device; None for no budget.
        available: bytes that XLA lets a program take without other options: see
            `memory_for_programs`.
        options: other options of the compiler.

    Returns:
        The first executable within the budget, or the smallest if there is none.
    """
    options = options or {}
    compiled = lowered.compile(compiler_options=options)
    if memory_budget is None:
        return compiled
    used = memory_of(compiled)
    kept = used.total - used.temporaries
    rest = available - kept
    share = 100 * (memory_budget - kept) / rest if rest > 0 else 0.0
    percent = int(min(95.0, max(0.0, share)))
    limits: list[dict[str, Any]] = [{_LIMIT: percent}] if percent else []
    limits += [{_SCHEDULER: True, _LIMIT: 0}, _NO_EARLY_COLLECTIVES]
    limits += [_NO_EARLY_COLLECTIVES | {_LIMIT: 0}]
    for limit in limits:
        if used.total <= memory_budget:
            break
        limited = lowered.compile(compiler_options=options | limit)
        if memory_of(limited).total < used.total:
            compiled, used = limited, memory_of(limited)
    return compiled


def compile_on(
    lowered: jax.stages.Lowered, memory_budget: float | None, device: Device
) -> jax.stages.Compiled:
    """Compile a program for devices of this process.

    Args:
        lowered: the program.
        memory_budget: bytes of one device; without effect on CPUs, where XLA has no such limit.
        device: a device of this process that runs the program.
    """
    if memory_budget is None or device.platform != "gpu":
        return lowered.compile()
    return compile_within(lowered, memory_budget, device.memory_stats()["bytes_limit"])
