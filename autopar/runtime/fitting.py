"""Plan again with a smaller memory budget where the compiled step exceeds the budget, although its plan did not."""

from collections.abc import Callable

from autopar.lowering.planned import PlannedStep
from autopar.planning.stage_problem import NoStagesError
from autopar.runtime.executable import Executable
from autopar.sharding.planner import MemoryBudgetError
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster
from simulator.memory import MemoryUse

ROUNDS = 4
"""The most plans that are compiled for one step."""


def budget_of(memory_budget: float | None, cluster: AnyCluster, platform: str) -> float | None:
    """Return the bytes of one device that a compiled step may use, or None where there is no such limit.

    A budget that the method is given is a limit everywhere. Without one, a GPU has its memory less its reserve.
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

    The planner estimates what XLA will need. Where that turns out to be more than the budget, the step is planned again with
    an estimate that is lower by the excess. Such a plan says so in its warnings.

    Args:
        budget: bytes of one device; None for no limit.
        plan_within: traces the step and plans it within so many bytes; None stands for what the method says.
        compiled: compiles a plan.

    Raises:
        MemoryBudgetError: no plan that was compiled fits.
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
            f"planned within {allowed / 1e9:.3g} GB per device: XLA's program for a plan within the budget of"
            f" {budget / 1e9:.3g} GB needs {used.total / 1e9:.3g} GB"
        )
        plan = planned.plan.model_copy(update={"warnings": (*planned.plan.warnings, warning)})
        planned = PlannedStep(planned.step, plan)
        del executable  # frees its memory on the devices
        executable = compiled(planned)
        used = _fullest(executable)
        least = min(least, used, key=lambda each: each.total)
    if used.total <= budget:
        return executable
    error = MemoryBudgetError(budget, least.total, planned.step.name)
    error.add_note(
        f"Of the plans that were compiled, the smallest needs {least.total / 1e9:.3g} GB, of which"
        f" {(least.outputs - least.aliased) / 1e9:.3g} GB are outputs that take the place of no input (see donate_argnums)"
    )
    raise error


def _fullest(executable: Executable) -> MemoryUse:
    """Return the memory of the device that needs most."""
    return max(executable.memory, key=lambda each: each.total)
