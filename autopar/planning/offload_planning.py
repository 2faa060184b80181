"""How much of the optimizer's state stays in host memory."""

from collections.abc import Callable

from autopar.ir.host_memory import Offload
from autopar.ir.step_graph import StepGraph
from autopar.recompute.offloading import offload, offloadable
from autopar.sharding.solve_within_memory import MemoryBudgetError

_PARTS = 16
"""With "auto", the number of arrays in host memory is found to this part of all of them."""


def plan_offloading[Planned](
    plan: Callable[[StepGraph], Planned], step: StepGraph, option: Offload
) -> Planned:
    """Return the plan of a step with as much state in host memory as the option says.

    Each byte in host memory takes the same time, so the least that is enough is also the fastest.

    Args:
        plan: Plans a step within its budget of memory.
        step: The traced step.
        option: What stays in host memory.

    Raises:
        MemoryBudgetError: No plan fits.
    """
    if option == "none":
        return plan(step)
    arrays = offloadable(step)
    if option == "auto":
        try:
            return plan(step)
        except MemoryBudgetError:
            if not arrays:
                raise
    best = plan(offload(step, arrays))
    too_few, enough = 0, len(arrays)
    while option == "auto" and enough - too_few > max(1, len(arrays) // _PARTS):
        number = (too_few + enough) // 2
        try:
            best = plan(offload(step, arrays[:number]))
            enough = number
        except MemoryBudgetError:
            too_few = number
    return best
