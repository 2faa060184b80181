"""Shardings of a part of a step where memory has a price: what the layers of a stage agree on to share its memory.

A limit on what many layers hold together couples them all. With a price on every byte held (a Lagrange multiplier) they are
apart again, each a small problem, and what they answer at several prices bounds what they can do together (Everett 1963).
"""

from dataclasses import dataclass

import numpy as np
from jax.extend.core import Var

from autopar.ir.spec import Spec
from autopar.ir.step_graph import StepGraph
from autopar.sharding.heuristic import propagate
from autopar.sharding.memory_constraint import Memory
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import ShardingOptions
from autopar.sharding.selection_problem import SelectionProblem
from autopar.sharding.solver import solve


@dataclass(frozen=True, slots=True)
class Priced:
    """The cheapest sharding at some price of memory.

    Attributes:
        choice: the option of each decision.
        seconds: of a step, without the price.
        bound: the least that seconds and what memory costs at that price can be together, as far as was proven.
        resident_bytes: on one device between forward and backward pass, with one microbatch; saved_bytes: what each microbatch
            holds of that; extra_bytes: by how much more the fullest moment has.
    """

    choice: tuple[int, ...]
    seconds: float
    bound: float
    resident_bytes: float
    saved_bytes: float
    extra_bytes: float

    def bytes(self, in_flight: int) -> float:
        """Resident with so many microbatches."""
        return self.resident_bytes + (in_flight - 1) * self.saved_bytes


class PricedProblem:
    """The choice problem of a step for any price of memory.

    Args:
        moment: number of the equation after the last one of the forward pass.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
    """

    def __init__(
        self,
        step: StepGraph,
        costs: MeshCosts,
        options: ShardingOptions,
        deferred: tuple[str, ...],
        moment: int,
    ) -> None:
        self.step, self.options = step, options
        self.decisions = enumerate_decisions(step, costs, options, deferred)
        self._memory = Memory(step, self.decisions, costs.mesh)
        # What comes from other parts and goes to them is held where it is kept, if it is.
        passing = {step.jaxpr.invars[i] for i in step.received_inputs}.difference(
            step.saved_for_backward
        )
        passing.update(
            v
            for o, v in enumerate(step.jaxpr.outvars)
            if o not in step.carried and isinstance(v, Var)
        )
        self._resident = self._memory.capacity_constraint(moment, np.inf, passing)
        self._held = self._memory.saved_for_backward()

    def solve(self, price: float, in_flight: int, tolerance: float) -> Priced:
        """The cheapest choice when a resident byte costs `price` seconds per step, or one proven to be near it, relative.

        Raises:
            InfeasibleError, TimeoutError: see `solve`.
        """
        problem = self._priced(price, in_flight)
        if self.options.mode == "solve":
            found = solve(problem, self.options.time_limit, tolerance)
        else:
            found = propagate(self.decisions.problem())
        choice, gap = found.choice, found.gap or 0.0
        held, resident = self._held.used(choice), self._resident.used(choice)
        used = self._memory.live_bytes(choice)
        seconds = self.decisions.problem().cost(choice)
        return Priced(
            choice,
            seconds,
            (1 - gap) * found.objective,
            resident,
            held,
            float(used.max()) - resident,
        )

    def _priced(self, price: float, in_flight: int) -> SelectionProblem:
        nodes, edges = list(self.decisions.costs), dict(self.decisions.edges)
        for limit, weight in ((self._resident, price), (self._held, (in_flight - 1) * price)):
            for i, use in limit.uses.items() if weight else ():
                nodes[i] = nodes[i] + weight * use
            for pair, use in limit.pairs.items() if weight else ():
                edges[pair] = edges[pair] + weight * use
        return SelectionProblem(nodes, edges)

    def eqn_seconds(self, found: Priced) -> tuple[float, ...]:
        """What each equation takes in a step."""
        return tuple(
            map(sum, self.decisions.seconds_by_equation(found.choice, len(self.step.jaxpr.eqns)))
        )

    def specs(self, found: Priced) -> list[Spec | None]:
        """Where each of `values_of` the step is; None: wherever it is needed."""
        placements = (self.decisions.placements.get(var) for var in values_of(self.step))
        return [p.specs[found.choice[p.decision]] if p else None for p in placements]


def values_of(step: StepGraph) -> list[Var]:
    """The inputs of a step, and what its equations make, in order."""
    return [*step.jaxpr.invars, *(var for eqn in step.jaxpr.eqns for var in eqn.outvars)]
