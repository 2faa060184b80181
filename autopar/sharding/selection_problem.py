"""Selection problems: one option per decision, with the least sum of node and edge costs.

This is a pairwise one-hot problem (a weighted constraint satisfaction problem), with capacity
constraints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np


class InfeasibleError(ValueError):
    """No choice avoids all forbidden options and satisfies all capacity constraints."""


class NoFasterError(InfeasibleError):
    """No choice that satisfies all constraints takes less time than a known one.

    Attributes:
        limit: seconds of the known choice.
        is_limited: whether some choice might be faster without capacity constraints.
    """

    def __init__(self, limit: float, is_limited: bool) -> None:
        self.limit, self.is_limited = limit, is_limited
        which = "no sharding that fits in memory" if is_limited else "no sharding"
        super().__init__(f"{which} takes less than the {limit:.4g} s of a known plan")


@dataclass(frozen=True, eq=False)
class CapacityConstraint:
    """A bound on a sum over decisions: the memory at one program point.

    Attributes:
        uses: for each decision in the sum, what each of its options uses.
        bound: upper bound of the sum over the selected options.
        pairs: for pairs (i, j) of decisions with an edge, i < j, what each pair of options uses in
            addition.
    """

    uses: Mapping[int, np.ndarray]
    bound: float
    pairs: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def used(self, choice: Sequence[int]) -> float:
        """Return the sum over the options of `choice`."""
        pairs = sum(float(use[choice[i], choice[j]]) for (i, j), use in self.pairs.items())
        return pairs + sum(float(use[choice[i]]) for i, use in self.uses.items())


@dataclass(frozen=True)
class SelectionProblem:
    """Costs of options and of pairs of options, in seconds; infinity forbids.

    Attributes:
        nodes: for each decision, the cost of each option.
        edges: for pairs (i, j) of decisions with i < j, the cost of each pair of options, shape
            (options of i, options of j).
        limits: the capacity constraints.
    """

    nodes: Sequence[np.ndarray]
    edges: Mapping[tuple[int, int], np.ndarray]
    limits: Sequence[CapacityConstraint] = ()

    def __post_init__(self) -> None:
        for (i, j), cost in self.edges.items():
            if not i < j or cost.shape != (len(self.nodes[i]), len(self.nodes[j])):
                sizes = (len(self.nodes[i]), len(self.nodes[j]))
                raise ValueError(
                    f"edge {(i, j)} needs i < j and costs of shape {sizes}, got {cost.shape}"
                )

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether `choice` satisfies all constraints, to the precision of the solver."""
        return all(limit.used(choice) <= limit.bound * (1 + 1e-6) for limit in self.limits)

    def cost(self, choice: Sequence[int]) -> float:
        """Return the cost of `choice`, an option per decision."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.nodes, choice, strict=True))
        return nodes + sum(float(cost[choice[i], choice[j]]) for (i, j), cost in self.edges.items())


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice, its cost, and its proven distance from the optimum.

    Attributes:
        choice: the chosen option of each decision.
        objective: its cost in seconds.
        gap: proven relative distance from the optimum (0 if optimal); None if nothing was proven.
        core: number of decisions that presolve and sweeps left to branches or HiGHS.
        is_limited: whether the problem had capacity constraints.
    """

    choice: tuple[int, ...]
    objective: float
    gap: float | None
    core: int
    is_limited: bool = False

    @property
    def bound(self) -> float:
        """Proven lower bound of the cost of every choice."""
        if self.gap is None or self.gap == inf:
            return -inf
        return self.objective - self.gap * abs(self.objective)
