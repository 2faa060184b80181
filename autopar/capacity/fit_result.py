"""The answer of `fit`: the size that fits, the plan that proves it, and the next that does not."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from autopar.capacity.memory_savings import MemorySaving
from autopar.plan import Plan
from autopar.sharding.selection_problem import InfeasibleError
from simulator.engine.prediction import Prediction

Largest = Literal["batch", "sequence", "layers"]
Fewest = Literal["hosts", "gpus"]


class NeverFitsError(InfeasibleError):
    """No size that was allowed fits into memory."""


@dataclass(frozen=True, slots=True)
class RefusedSize:
    """The next size in the direction that was asked for, which does not fit.

    Attributes:
        size: the size.
        reason: why it does not fit.
        needed_bytes: predicted bytes of one device that it needs; None if it has no plan at all.
        changes: changes of the method or the cluster after which it fits.
    """

    size: int
    reason: str
    needed_bytes: int | None
    changes: tuple[MemorySaving, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest size of a step that fits into memory, or the smallest cluster that it fits on.

    Attributes:
        quantity: what varies: "batch", "sequence", "layers", "hosts" or "gpus".
        size: the answer.
        budget: bytes of one device that the step may use.
        plan: the plan of that size.
        prediction: its prediction; of the program that XLA compiles if `is_confirmed`.
        is_confirmed: whether XLA compiled the plan within the budget.
        refused: the next larger size, or the next smaller cluster, which does not fit. None if the
            answer is at the limit of the sizes that were allowed.
        tried: the sizes that were planned, and whether each fits by the planner's estimate.
    """

    quantity: Largest | Fewest
    size: int
    budget: float
    plan: Plan
    prediction: Prediction
    is_confirmed: bool
    refused: RefusedSize | None
    tried: tuple[tuple[int, bool], ...]

    def __str__(self) -> str:
        plan, used = self.plan, self.prediction.memory.total
        which = "fewest" if self.quantity in ("hosts", "gpus") else "largest"
        devices = sum(prod(stage.mesh_shape) for stage in plan.stages) // plan.schedule.num_chunks
        how = "compiled" if self.is_confirmed else "predicted, not compiled"
        lines = [
            f"{which} {self.quantity}: {self.size}",
            f"  plan: {plan.method} on {devices} devices of {plan.cluster},"
            f" mesh {plan.meshes_text()}, {plan.num_micro_batches} microbatch(es)",
            f"  planned: {plan.predicted_bytes / 1e9:.4g} GB per device,"
            f" {plan.predicted_seconds * 1e3:.4g} ms",
            f"  {how}: {used / 1e9:.4g} GB per device of {self.budget / 1e9:.4g} GB,"
            f" {self.prediction.seconds * 1e3:.4g} ms",
        ]
        if self.refused is None:
            return "\n".join([*lines, "  nothing beyond it was allowed"])
        lines.append(f"{self.quantity}={self.refused.size} does not fit: {self.refused.reason}")
        if self.refused.changes:
            lines.append("  it would fit with")
            lines += [
                f"    {saving.change} ({saving.num_bytes / 1e9:.4g} GB per device,"
                f" {saving.seconds * 1e3:.4g} ms)"
                for saving in self.refused.changes
            ]
        return "\n".join(lines)
