"""One-hot selection problems: pick one option per decision so that the sum of node and edge costs is minimal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np


class InfeasibleError(ValueError):
    """No choice avoids every forbidden option and keeps within every limit."""


@dataclass(frozen=True, eq=False)
class CapacityConstraint:
    """A bound on a sum over decisions: what is alive at one moment must fit into memory.

    Attributes:
        uses: for the decisions that take part, how much each option uses.
        bound: what the chosen options may use together.
        pairs: for pairs (i, j) of decisions that have an edge, i < j, how much each pair of options uses beside that.
    """

    uses: Mapping[int, np.ndarray]
    bound: float
    pairs: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def used(self, choice: Sequence[int]) -> float:
        """What the options of `choice` use together."""
        pairs = sum(float(use[choice[i], choice[j]]) for (i, j), use in self.pairs.items())
        return pairs + sum(float(use[choice[i]]) for i, use in self.uses.items())


@dataclass(frozen=True)
class SelectionProblem:
    """Costs of options and of pairs of options, in seconds; an infinite cost forbids.

    Attributes:
        nodes: for each decision, the cost of each option.
        edges: for pairs (i, j) of decisions with i < j, the cost of each pair of options, (options of i, options of j).
        limits: what every choice must keep within.
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
        """Whether `choice` keeps within every limit (to the precision of the solver)."""
        return all(limit.used(choice) <= limit.bound * (1 + 1e-6) for limit in self.limits)

    def cost(self, choice: Sequence[int]) -> float:
        """What `choice`, an option per decision, costs."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.nodes, choice, strict=True))
        return nodes + sum(float(cost[choice[i], choice[j]]) for (i, j), cost in self.edges.items())


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice, what it costs, and how far from the optimum it may be.

    Attributes:
        choice: the chosen option of each decision.
        objective: its cost in seconds.
        gap: proven relative distance to the optimum (0 when optimal); None where nothing was proven.
        core: decisions that were left for HiGHS.
    """

    choice: tuple[int, ...]
    objective: float
    gap: float | None
    core: int

    @property
    def bound(self) -> float:
        """What every choice is proven to cost at least."""
        if self.gap is None or self.gap == inf:
            return -inf
        return self.objective - self.gap * abs(self.objective)
