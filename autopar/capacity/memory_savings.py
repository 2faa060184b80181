"""`savings`: the changes that make a step fit, each with the bytes that it saves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from autopar.capacity.budgeted_step import BudgetedStep, DoesNotFit, checked_cluster
from autopar.capacity.memory_changes import MemoryChange, memory_changes
from autopar.checks import BYTES, NONE, checked
from autopar.ir.step_graph import MicrobatchError
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import LayerError
from autopar.methods import PLANNING_METHOD, PlanningMethod
from autopar.pipeline.stage_options import StageError
from autopar.plan import Plan
from autopar.planning.method_planning import any_cluster
from autopar.progress import progress_part
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import InfeasibleError
from autopar.tracing.arguments import BatchArgnums
from autopar.tracing.shared_traces import shared_traces
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster

NotPossible = (
    *DoesNotFit,
    ClusterError,
    InfeasibleError,
    LayerError,
    MicrobatchError,
    NoLayersError,
    ShardingError,
    StageError,
)
"""The errors of a step that a method or a cluster can't run, or can't fit."""


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A change of the method or the cluster, and the memory that the step then needs.

    Attributes:
        change: the change in words, or as the option to give.
        num_bytes: predicted bytes of one device.
        saved_bytes: predicted bytes of one device that the change saves.
        seconds: predicted seconds of one step.
        fits: whether the bytes are within the budget.
        plan: the plan: the fastest that fits, or the one that needs least.
    """

    change: str
    num_bytes: int
    saved_bytes: int
    seconds: float
    fits: bool
    plan: Plan

    def __str__(self) -> str:
        outcome = "fits" if self.fits else "does not fit"
        return (
            f"{self.change}: {outcome}, {self.num_bytes / 1e9:.3g} GB, which is"
            f" {self.saved_bytes / 1e9:.3g} GB less, {self.seconds * 1e3:.4g} ms"
        )


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """What a step needs, and the changes after which it needs less.

    Each change is planned, and has the numbers of its plan.

    Attributes:
        budget: bytes of one device that the step may use.
        plan: the plan without a change; if none fits, the one that needs least.
        alone: each change by itself, with the most bytes saved first.
        together: changes one after the other, until the step fits. The change that costs least
            time for each byte that it saves is first, more hosts are last. The bytes saved are the
            sum over all changes so far. Empty if the step fits.
    """

    budget: float
    plan: Plan
    alone: tuple[MemorySaving, ...]
    together: tuple[MemorySaving, ...]

    @property
    def fits(self) -> bool:
        """Whether the step fits without a change."""
        return self.plan.predicted_bytes <= self.budget

    def __str__(self) -> str:
        needed = f"{self.plan.step} needs {needed_text(self.plan)}"
        budget = f"{self.budget / 1e9:.3g} GB"
        if self.fits:
            return f"{needed}: it fits into {budget}"
        lines = [f"{needed}; the budget is {budget}", "each change by itself:"]
        lines += [f"  {saving}" for saving in self.alone] or ["  none is possible"]
        if self.together:
            lines.append("in order, until it fits:")
            lines += [f"  {saving}" for saving in self.together]
        if not any(saving.fits for saving in (*self.alone, *self.together)):
            lines.append("no combination that was tried fits")
        return "\n".join(lines)


def needed_text(plan: Plan) -> str:
    """Return the predicted bytes of a plan, and what they are."""
    roles = str(plan.predicted_memory)
    return f"{plan.predicted_bytes / 1e9:.3g} GB per device" + (f" ({roles})" if roles else "")


def savings(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    method: PlanningMethod | None = None,
    cluster: AnyCluster | str | Path,
    memory_budget: float | None = None,
    batch_argnums: BatchArgnums = "auto",
) -> MemorySavings:
    """Return what would make a step fit into memory, each change with the bytes that it saves.

    The changes are recomputation (`remat="auto"`), sharding of the optimizer state, of parameters
    and of all values, more microbatches and more hosts, as far as the step and the method allow
    them. Each is planned; nothing is compiled. Least bytes are found by bisection, to within a few
    percent.

    Args:
        fun: the training step.
        args: its arguments, arrays or ShapeDtypeStructs.
        method: how to parallelize; by default the fastest pipeline or sharding, as
            `autopar plan --method auto`.
        cluster: the cluster, its name or the path of its file.
        memory_budget: bytes of one device that the step may use; by default those of the method, or
            the device's memory less its reserve.
        batch_argnums: as in `parallelize`.

    Raises:
        ClusterError: the cluster has pools of different hosts.
        OptionError: an option has another type.

    Example:
        >>> print(autopar.savings(train_step, args, cluster="dgx_a100_80"))
    """
    method = checked("method", method, NONE | PLANNING_METHOD)
    hardware = checked_cluster(any_cluster(cluster), "savings")
    budget = budget_of_method(memory_budget, method, hardware.device.usable_bytes)
    step = BudgetedStep(fun, args, hardware, budget, method, batch_argnums)
    with shared_traces():
        return memory_savings(step)


def budget_of_method(
    memory_budget: float | None, method: PlanningMethod | None, usable_bytes: float
) -> float:
    """Return the bytes that a step may use: as given, else by the method, else by the device."""
    given = checked("memory_budget", memory_budget, BYTES | NONE)
    if given is None and method is not None:
        given = method.memory_budget
    return usable_bytes if given is None else given


def memory_savings(step: BudgetedStep, *, may_buy: bool = True) -> MemorySavings:
    """Return what would make a step fit; see `savings`.

    Args:
        step: the step.
        may_buy: whether more devices are a change.
    """
    with progress_part(0, 0.2, "memory without a change"):
        base = _plan_or_least(step)
        free_seconds = step.free_plan().predicted_seconds
    if base.predicted_bytes <= step.budget:
        return MemorySavings(step.budget, base, (), ())
    with progress_part(0.2, 0.7, "each change"):
        measured = [
            (change, saving)
            for forms in memory_changes(step)
            if may_buy or not forms[0].buys
            for change, saving in _strongest_needed(step, forms, base)
        ]
    least = _LEAST_SAVING * base.predicted_bytes
    measured = [(change, saving) for change, saving in measured if saving.saved_bytes > least]

    def price(item: tuple[MemoryChange, MemorySaving]) -> tuple[bool, float]:
        change, saving = item
        return change.buys, max(0.0, saving.seconds - free_seconds) / saving.saved_bytes

    with progress_part(0.7, 1, "changes together"):
        changes = [change for change, _ in sorted(measured, key=price)]
        together = tuple(_in_order(step, changes, base))
    by_bytes = sorted((saving for _, saving in measured), key=lambda saving: -saving.saved_bytes)
    return MemorySavings(step.budget, base, tuple(by_bytes), together)


_LEAST_SAVING = 0.01
"""Share of the memory that a change must save to be listed."""


def fitting_changes(
    step: BudgetedStep, needed_bytes: float, *, may_buy: bool
) -> tuple[MemorySaving, ...]:
    """Return the changes after which a step fits, each by itself, in its weakest form.

    Args:
        step: a step that does not fit.
        needed_bytes: the bytes that it needs.
        may_buy: whether more devices are a change.
    """
    found = []
    for forms in memory_changes(step):
        for change in forms:
            if change.buys and not may_buy:
                continue
            changed = change.apply(step)
            try:
                plan = changed and changed.plan()
            except NotPossible:
                continue
            if plan is not None:
                found.append(_saving(change.text, plan, needed_bytes, step.budget))
                break
    return tuple(found)


def _strongest_needed(
    step: BudgetedStep, forms: Sequence[MemoryChange], base: Plan
) -> Iterator[tuple[MemoryChange, MemorySaving]]:
    """Yield the weakest form of a change that fits, or the form that saves most."""
    best: tuple[MemoryChange, MemorySaving] | None = None
    for change in forms:
        changed = change.apply(step)
        try:
            plan = changed and _plan_or_least(changed)
        except NotPossible:
            continue
        if plan is None:
            continue
        saving = _saving(change.text, plan, base.predicted_bytes, step.budget)
        if best is None or saving.num_bytes < best[1].num_bytes:
            best = change, saving
        if saving.fits:
            break
    if best is not None:
        yield best


def _in_order(
    step: BudgetedStep, changes: Sequence[MemoryChange], base: Plan
) -> Iterator[MemorySaving]:
    """Yield what a step needs after each change in turn, until it fits."""
    least = inf  # the most that the step may need for a change to count
    for change in changes:
        changed = change.apply(step)
        try:
            plan = changed and _plan_or_least(changed)
        except NotPossible:
            continue
        if changed is None or plan is None or plan.predicted_bytes > least:
            continue
        step, least = changed, (1 - _LEAST_SAVING) * plan.predicted_bytes
        saving = _saving(change.text, plan, base.predicted_bytes, step.budget)
        yield saving
        if saving.fits:
            return


def _saving(text: str, plan: Plan, needed_bytes: float, budget: float) -> MemorySaving:
    return MemorySaving(
        change=text,
        num_bytes=plan.predicted_bytes,
        saved_bytes=round(needed_bytes - plan.predicted_bytes),
        seconds=plan.predicted_seconds,
        fits=plan.predicted_bytes <= budget,
        plan=plan,
    )


def _plan_or_least(step: BudgetedStep) -> Plan:
    """Return the fastest plan that fits, or the one that needs least."""
    try:
        return step.plan()
    except DoesNotFit:
        return step.least_plan()
