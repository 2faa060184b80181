"""Capacities are tightened by what one solution needs besides, and loosened if nothing is left."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from autopar.sharding.options import ShardingOptions
from autopar.sharding.selection_problem import CapacityConstraint, SelectionProblem
from autopar.sharding.solve_within_memory import (
    MemoryBudgetError,
    Start,
    solve_within_memory,
)
from autopar.sharding.solver import solve
from autopar.sharding.step_decisions import Decisions
from autopar.sharding.step_memory import StepMemory

LIVE = np.array([100.0, 96.0])
"""Bytes that are live at the only program point, by option."""

PROBLEM = SelectionProblem([np.array([1.0, 2.0])], {})
"""The more bytes an option needs, the fewer seconds it takes."""


class GappedMemory:
    """A memory whose heap has other gaps for each option."""

    step = SimpleNamespace(name="step")

    def __init__(self, gaps: Sequence[float]) -> None:
        self.gaps = gaps

    def lower_bound(self) -> float:
        return LIVE.min()

    def live_bytes(self, choice: Sequence[int]) -> np.ndarray:
        return LIVE[choice[0], None]

    def reserved_bytes(self, choice: Sequence[int]) -> float:
        return LIVE[choice[0]] + self.gaps[choice[0]]

    def capacity_constraint(self, point: int, budget: float) -> CapacityConstraint:
        return CapacityConstraint({0: LIVE}, budget)


@pytest.mark.parametrize(
    ("gaps", "chosen"), [([0, 0], 0), ([10, 0], 0), ([11, 0], 1), ([30, 5], 1)], ids=str
)
def test_the_option_that_fits_with_its_gaps_is_found(gaps, chosen):
    memory = cast(StepMemory, GappedMemory(gaps))
    solution, reserved = solve_within_memory(memory, PROBLEM, 110.0, ShardingOptions(), None)
    assert list(solution.choice) == [chosen]
    assert reserved == LIVE[chosen] + gaps[chosen]


def test_nothing_fits_if_no_option_does_with_its_gaps():
    memory = cast(StepMemory, GappedMemory([30, 20]))
    with pytest.raises(MemoryBudgetError, match="more than that"):
        solve_within_memory(memory, PROBLEM, 110.0, ShardingOptions(), None)


def test_starts_are_read_until_one_is_within_the_budget():
    """The first start exceeds the budget, the second one fits, and the third one is not read."""
    var = cast(Var, object())
    placement = SimpleNamespace(decision=0, specs=(P("x"), P("y")))
    memory = cast(StepMemory, GappedMemory([11, 0]))
    memory.decisions = cast(Decisions, SimpleNamespace(placements={var: placement}))
    read: list[P] = []

    def specs() -> Iterator[dict[Var, P]]:
        for spec in (P("x"), P("y"), P("x")):
            read.append(spec)
            yield {var: spec}

    start = Start((), specs(), 2.0)  # the bound proves that the second one is optimal
    with patch("autopar.sharding.solve_within_memory.solve", wraps=solve) as solves:
        solution, reserved = solve_within_memory(memory, PROBLEM, 110.0, ShardingOptions(), start)
    assert (solution.choice, reserved, solution.gap) == ((1,), 96.0, 0.0)
    assert read == [P("x"), P("y")]
    assert solves.call_count == 2  # of starts


class CoupledMemory:
    """A memory of two decisions that are live at the same point."""

    step = SimpleNamespace(name="step")

    def lower_bound(self) -> float:
        return 0.0

    def live_bytes(self, choice: Sequence[int]) -> np.ndarray:
        return np.array([sum(float(use[k]) for use, k in zip(USES, choice, strict=True))])

    def reserved_bytes(self, choice: Sequence[int]) -> float:
        return self.live_bytes(choice).max()

    def capacity_constraint(self, point: int, budget: float) -> CapacityConstraint:
        return CapacityConstraint(dict(enumerate(USES)), budget)


USES = np.array([60.0, 30.0]), np.array([70.0, 50.0, 38.0])
"""Bytes of the options of two decisions."""


@pytest.mark.parametrize("budget", [131, 112, 102, 99, 84, 70])
def test_the_fastest_choice_within_the_budget_is_found(budget):
    memory = cast(StepMemory, CoupledMemory())
    problem = SelectionProblem([np.array([1.0, 1.04]), np.array([1.0, 1.01, 1.02])], {})
    solution, reserved = solve_within_memory(memory, problem, budget, ShardingOptions(), None)
    choices = [(i, j) for i in range(2) for j in range(3)]
    fitting = [choice for choice in choices if memory.reserved_bytes(choice) <= budget]
    assert solution.objective == pytest.approx(min(map(problem.cost, fitting)))
    assert reserved == memory.reserved_bytes(solution.choice)
    assert solution.gap == 0
