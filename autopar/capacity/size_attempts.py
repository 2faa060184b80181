"""Sizes of a step, or of a cluster, that are planned and compiled within a memory budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.capacity.budgeted_step import BudgetedStep, DoesNotFit, ProgramTooLargeError
from autopar.capacity.fit_result import Fewest, Largest, NeverFitsError, RefusedSize
from autopar.capacity.memory_savings import (
    NotPossible,
    fitting_changes,
    memory_savings,
    needed_text,
)
from autopar.capacity.size_search import boundary
from autopar.plan import Plan
from autopar.progress import progress_part
from autopar.tracing.shared_traces import shared_traces
from simulator.engine.prediction import Prediction
from simulator.files import one_line

_SIZE_NAMES: dict[str, str] = {
    "batch": "batch size",
    "sequence": "sequence length",
    "layers": "number of layers",
    "hosts": "number of hosts",
    "gpus": "number of GPUs",
}

_REMAINING = 0.85
"""Share of the remaining work that is left after each plan, as the number of plans is unknown."""


@dataclass
class SizeAttempts:
    """What was planned and compiled so far; sizes are given by their index.

    Attributes:
        quantity: what varies.
        sizes: the sizes in rising order.
        step_of: returns the step of a size.
        rungs: indices of the sizes to try first if the size that is started from does not fit; by
            default strides double.
        plans: the plans within the budget by index; an error where there is none.
        compiled: compiled plans within the budget with their predictions, likewise.
        excess: bytes of a compiled program divided by those of its plan; one before any is known.
    """

    quantity: Largest | Fewest
    sizes: Sequence[int]
    step_of: Callable[[int], BudgetedStep]
    rungs: Sequence[int] = ()
    plans: dict[int, Plan | ValueError] = field(default_factory=dict)
    compiled: dict[int, tuple[Plan, Prediction] | ValueError] = field(default_factory=dict)
    excess: float = 1.0

    @property
    def is_cluster(self) -> bool:
        """Whether the size is a number of hosts or devices."""
        return self.quantity in ("hosts", "gpus")

    def fits(self, index: int) -> bool:
        """Return whether the planner finds a plan within the budget divided by `excess`."""
        if index not in self.plans:
            self.plans[index] = self._attempt(
                index, lambda step: step.plan(step.budget / self.excess)
            )
        return isinstance(self.plans[index], Plan)

    def learn_excess(self, index: int) -> None:
        """Compile the plan of a size that fits, and judge all sizes by what it needs."""
        plan = self.plans[index]
        assert isinstance(plan, Plan)
        with shared_traces():
            used = self._step(index).predict(plan, compiled=True).memory.total
        self.excess = used / plan.predicted_bytes
        self.plans.clear()

    def fits_compiled(self, index: int) -> bool:
        """Return whether there is a plan that XLA compiles within the budget."""
        if index not in self.compiled:
            self.compiled[index] = self._attempt(
                index, lambda step: step.compiled_within(self.excess)
            )
        return not isinstance(self.compiled[index], ValueError)

    def first_guess(self) -> int:
        """Return the index at which memory would be full if it grew as between two small sizes."""
        last = len(self.sizes) - 1
        if not last or not self.fits(0) or not self.fits(1):
            return 0
        plans = self.plans[0], self.plans[1]
        assert isinstance(plans[0], Plan)
        assert isinstance(plans[1], Plan)
        growth = plans[1].predicted_bytes - plans[0].predicted_bytes
        room = self._step(0).budget - plans[0].predicted_bytes
        return int(min(last, room / growth)) if growth > 0 else last

    def never_fits(self, index: int) -> NeverFitsError:
        """Return the error of a step that fits at no size.

        Args:
            index: the size at which the step needs least if more devices help.
        """
        lacking = [i for i, plan in self.plans.items() if isinstance(plan, DoesNotFit)]
        if lacking and not isinstance(self.plans.get(index), DoesNotFit):
            index = max(lacking)  # a larger cluster has no plan for another reason
        step = self._step(index)
        sizes = f"{_SIZE_NAMES[self.quantity]} from {self.sizes[0]} to {self.sizes[-1]}"
        refused = self.plans.get(index, self.compiled.get(index))
        if isinstance(refused, ValueError) and not isinstance(refused, DoesNotFit):
            return NeverFitsError(
                f"no {sizes} has a plan; {self.quantity}={self.sizes[index]}: {one_line(refused)}"
            )
        with shared_traces():
            found = memory_savings(step, may_buy=not self.is_cluster)
        alone = [saving.change for saving in found.alone if saving.fits]
        if alone:
            would = f"it would fit with {', or with '.join(alone)}"
        elif found.together and found.together[-1].fits:
            changes = " and ".join(saving.change for saving in found.together)
            would = f"it would fit with {changes} together"
        elif found.together:
            changes = " and ".join(saving.change for saving in found.together)
            least = f"{found.together[-1].num_bytes / 1e9:.3g} GB"
            would = f"with {changes} it would still need {least}"
        else:
            would = "no change of the method or the cluster was found that saves memory"
        return NeverFitsError(
            f"no {sizes} fits into {step.budget / 1e9:.3g} GB per device:"
            f" {self.quantity}={self.sizes[index]} needs {needed_text(found.plan)}; {would}"
        )

    def refused(self, index: int) -> RefusedSize:
        """Return why a size does not fit, and what would make it fit."""
        step = self._step(index)
        error = self.compiled.get(index, self.plans.get(index))
        assert isinstance(error, ValueError)
        if not isinstance(error, DoesNotFit):
            return RefusedSize(self.sizes[index], one_line(error), None, ())
        budget = f"{step.budget / 1e9:.4g} GB"
        with shared_traces():
            needed: float
            if isinstance(error, ProgramTooLargeError):
                needed = error.least
                reason = f"its compiled program needs {needed / 1e9:.4g} GB per device of {budget}"
            else:
                least = step.least_plan()
                needed = least.predicted_bytes
                reason = f"it needs {needed_text(least)} of {budget}"
            within = replace(step, budget=step.budget / max(1.0, self.excess))
            changes = fitting_changes(within, needed, may_buy=not self.is_cluster)
        return RefusedSize(self.sizes[index], reason, round(needed), changes)

    def _attempt[T](self, index: int, attempt: Callable[[BudgetedStep], T]) -> T | ValueError:
        """Return the result of a planning attempt, or the error of a step that does not fit."""
        text = f"{self.quantity}={self.sizes[index]}"
        count = len(self.plans) + len(self.compiled)
        begin, end = 1 - _REMAINING**count, 1 - _REMAINING ** (count + 1)
        try:
            with progress_part(begin, end, text), shared_traces():
                return attempt(self._step(index))
        except NotPossible as error:
            if self.is_cluster or isinstance(error, DoesNotFit):
                return error
            raise ValueError(f"{text}: {one_line(error)}") from error

    def _step(self, index: int) -> BudgetedStep:
        return self.step_of(self.sizes[index])


def settled(
    holds: Callable[[int], bool], start: int, towards: int, back: int, rungs: Sequence[int]
) -> tuple[int, int | None] | None:
    """Return the last index with a property towards one end, and the next, which lacks it.

    Args:
        holds: the property.
        start: the index to start from; the property need not hold there.
        towards: the end at which the property is least likely.
        back: the other end.
        rungs: the indices to try first on the way back; by default strides double.

    Returns:
        The two indices; the second is None if the property holds at the end. None if no index was
        found that has the property.
    """
    if holds(start):
        return boundary(holds, start, towards)
    refused, found = boundary(lambda index: not holds(index), start, back, rungs)
    return None if found is None else (found, refused)
