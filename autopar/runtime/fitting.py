"""Fitting compiled steps to the memory budget, by planning again with a smaller one."""

from collections.abc import Callable

from autopar.lowering.planned import PlannedStep
from autopar.planning.stage_problem import NoStagesError
from autopar.runtime.executable import Executable
from autopar.sharding.solve_within_memory import MemoryBudgetError
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import MemoryUse

ROUNDS = 4
"""Maximum number of plans that are compiled for one step."""


def budget_of(memory_budget: float | None, cluster: AnyCluster, platform: str) -> float | None:
    """Return the bytes of one device that a compiled step may use, or None if there is no limit.

    Args:
        memory_budget: the method's budget; it holds on every platform.
        cluster: its devices' memory less their reserve is the limit of GPUs without a budget.
        platform: the platform of the devices.
    """
    if memory_budget is not None:
        return memory_budget
    return (
        cluster.device.usable_bytes if platform != "cpu" and isinstance(cluster, Cluster) else None
    )


def compiled_within[E: Executable](
    budget: float | None,
    plan_within: Callable[[float | None], PlannedStep],
    compiled: Callable[[PlannedStep], E],
) -> E:
    """Plan and compile a step so that XLA's buffer assignment is within the budget.

    The planner estimates the memory that XLA will need. If the compiled step needs more than the
    budget, the step is planned again with an estimate that is lower by the excess, and the plan
    has a warning.

    Args:
        budget: bytes of one device; None for no limit.
        plan_within: traces and plans the step within a number of bytes; None for the method's own
            budget.
        compiled: compiles a plan.

    Raises:
        MemoryBudgetError: no plan that was compiled is within the budget.
    """
    planned = plan_within(None)
    executable = compiled(planned)
    if budget is None:
        return executable
    least = used = _fullest(executable)
    for _ in range(ROUNDS - 1):
        allowed = planned.plan.predicted_bytes - (used.total - budget)
        if used.total <= budget or allowed <= 0:
            break
        try:
            planned = plan_within(allowed)
        except (MemoryBudgetError, NoStagesError):
            break
        warning = (
            f"planned within {allowed / 1e9:.3g} GB per device: XLA's program for a plan within the"
            f" budget of {budget / 1e9:.3g} GB needs {used.total / 1e9:.3g} GB"
        )
        plan = planned.plan.model_copy(update={"warnings": (*planned.plan.warnings, warning)})
        planned = PlannedStep(planned.step, plan)
        del executable  # frees its memory on the devices
        executable = compiled(planned)
        used = _fullest(executable)
        least = min(least, used, key=lambda memory: memory.total)
    if used.total <= budget:
        return executable
    error = MemoryBudgetError(budget, least.total, planned.step.name)
    error.add_note(
        f"Of the plans that were compiled, the smallest needs {least.total / 1e9:.3g} GB, of which"
        f" {(least.outputs - least.aliased) / 1e9:.3g} GB are outputs that take the place of no"
        " input (see donate_argnums)"
    )
    raise error


def _fullest(executable: Executable) -> MemoryUse:
    """Return the memory of the device that needs most."""
    return max(executable.memory, key=lambda memory: memory.total)
