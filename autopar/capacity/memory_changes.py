"""Changes of a method or a cluster that save memory, such as recomputation or another host."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from autopar.capacity.budgeted_step import BudgetedStep
from autopar.methods import (
    DataParallel,
    PlanningMethod,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)

FACTORS = (2, 4, 8)
"""Factors of more microbatches or hosts, in the order in which they are tried."""

_MORE_SHARDED: dict[type[PlanningMethod], str] = {
    Zero2Parallel: "Zero2Parallel, which shards gradients and optimizer state",
    Zero3Parallel: "Zero3Parallel, which shards parameters, too",
    ShardParallel: "ShardParallel, which may shard every value",
}
"""Methods that shard a whole step, from the one that shards least, after DataParallel."""


@dataclass(frozen=True)
class MemoryChange:
    """A change of a method or a cluster that saves memory.

    Attributes:
        text: the change in words, or as the option to give.
        apply: returns the changed step; None if the change is none for a step.
        buys: whether it needs more devices.
    """

    text: str
    apply: Callable[[BudgetedStep], BudgetedStep | None]
    buys: bool = False


def memory_changes(step: BudgetedStep) -> Iterator[tuple[MemoryChange, ...]]:
    """Yield the changes that a step allows; each with stronger forms of itself after it."""
    if step.planning_method.recomputing is not None:
        text, _ = step.planning_method.recomputing
        yield (MemoryChange(text, _recomputing),)
    for method, text in _MORE_SHARDED.items():
        yield (MemoryChange(text, _Sharding(method)),)
    if step.planning_method.offload == "none":
        yield (MemoryChange('offload="optimizer"', _offloading),)
    count = step.planning_method.num_micro_batches
    if isinstance(count, int):
        yield tuple(
            MemoryChange(f"num_micro_batches={count * factor}", _MicroBatches(factor))
            for factor in FACTORS
        )
    yield tuple(
        MemoryChange(f"{step.cluster.hosts * factor} hosts", _Hosts(factor), buys=True)
        for factor in FACTORS
    )


def _recomputing(step: BudgetedStep) -> BudgetedStep | None:
    change = step.planning_method.recomputing
    return change and replace(step, method=change[1])


def _offloading(step: BudgetedStep) -> BudgetedStep:
    return replace(step, method=replace(step.planning_method, offload="optimizer"))


@dataclass(frozen=True)
class _Sharding:
    """Change to a method that shards more of a whole step."""

    method: type[PlanningMethod]

    def __call__(self, step: BudgetedStep) -> BudgetedStep | None:
        method = step.planning_method
        order: list[type[PlanningMethod]] = [DataParallel, *_MORE_SHARDED]
        if type(method) not in order or order.index(type(method)) >= order.index(self.method):
            return None
        options = {field.name: getattr(method, field.name) for field in fields(PlanningMethod)}
        return replace(step, method=self.method(**options))


@dataclass(frozen=True)
class _MicroBatches:
    """Change to more microbatches."""

    factor: int

    def __call__(self, step: BudgetedStep) -> BudgetedStep | None:
        method = step.planning_method
        count = method.num_micro_batches
        if not isinstance(count, int):
            return None
        return replace(step, method=replace(method, num_micro_batches=self.factor * count))


@dataclass(frozen=True)
class _Hosts:
    """Change to a cluster of more hosts."""

    factor: int

    def __call__(self, step: BudgetedStep) -> BudgetedStep | None:
        if step.cluster.inter_host is None or step.planning_method.devices is not None:
            return None
        hosts = self.factor * step.cluster.hosts
        return replace(step, cluster=step.cluster.with_size(hosts=hosts))
