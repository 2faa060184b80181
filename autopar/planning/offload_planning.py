"""Selection of what a step as one program keeps in host memory: state, forward values, or both."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from autopar.ir.host_memory import Offload
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.recompute.offloading import offload, offloadable
from autopar.sharding.solve_within_memory import MemoryBudgetError

_PARTS = 16
"""With "auto", the number of arrays in host memory is found to this part of all of them."""

type _Plan = Callable[[StepGraph, bool], PlannedStep]
"""(step, whether values of its forward pass may be in host memory) -> its plan within a budget."""


def plan_offloading(plan: _Plan, step: StepGraph, option: Offload) -> PlannedStep:
    """Return the plan of a step with what the option says in host memory.

    Args:
        plan: plans a step within its budget of memory.
        step: the traced step.
        option: what is in host memory.

    Raises:
        MemoryBudgetError: No plan fits.
    """
    match option:
        case "none" | "activations":
            return plan(step, option == "activations")
        case "optimizer":
            return plan(offload(step, offloadable(step)), False)
        case "auto":
            return _fastest(plan, step)


def _fastest(plan: _Plan, step: StepGraph) -> PlannedStep:
    """Return the fastest plan that fits, with nothing in host memory if it needs nothing there."""
    error: MemoryBudgetError | None = None
    found: list[PlannedStep] = []
    try:
        found.append(plan(step, False))
        if not found[0].plan.recomputed:
            return found[0]
    except MemoryBudgetError as without:
        error = without
    with suppress(MemoryBudgetError):
        found.append(plan(step, True))
    arrays = offloadable(step)
    if arrays and error is not None:
        found += _least_state(plan, step, arrays)
    if arrays and (error is None or not found):
        try:
            found.append(plan(offload(step, arrays), True))
        except MemoryBudgetError as most:
            error = most
    if not found:
        assert error is not None
        raise error
    return min(found, key=lambda planned: planned.plan.predicted_seconds)


def _least_state(plan: _Plan, step: StepGraph, arrays: tuple[int, ...]) -> Iterator[PlannedStep]:
    """Yield the plan with as little state in host memory as lets the step fit, if that is enough.

    Each byte in host memory takes the same time, so the least that is enough is also the fastest.
    """
    try:
        best = plan(offload(step, arrays), False)
    except MemoryBudgetError:
        return
    too_few, enough = 0, len(arrays)
    while enough - too_few > max(1, len(arrays) // _PARTS):
        number = (too_few + enough) // 2
        try:
            best = plan(offload(step, arrays[:number]), False)
            enough = number
        except MemoryBudgetError:
            too_few = number
    yield best
