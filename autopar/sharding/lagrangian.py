"""The Lagrangian subproblem: shardings of a layer in which memory has a price.

A capacity constraint couples all layers of a stage. With a price per byte (a Lagrange multiplier)
the layers are independent, small problems. Their solutions at several prices bound the solution of
the stage (Everett 1963).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from jax.extend.core import Var

from autopar.ir.graph import aval_of, variables
from autopar.ir.spec import Spec
from autopar.ir.step_graph import StepGraph
from autopar.sharding.dataflow import analyze
from autopar.sharding.distinct_options import each_once
from autopar.sharding.heuristic import propagate
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import ShardingOptions
from autopar.sharding.selection_problem import (
    CapacityConstraint,
    InfeasibleError,
    SelectionProblem,
)
from autopar.sharding.solver import Solver, solve
from autopar.sharding.step_memory import StepMemory

_BRANCHING_GAP = 0.03
"""Relative gap up to which a solve with a tolerance ends without branches.

Branches take most of the time, and mostly prove that the choice that sweeps found is as good.
Stages composed of such choices are solved as a whole, to the tolerance of the plan.
"""


type Uses = Mapping[int, np.ndarray]
"""Bytes under each option of decisions, by their number."""

type Pairs = Mapping[tuple[int, int], np.ndarray]
"""Bytes under each pair of options of pairs of decisions."""


@dataclass(frozen=True, slots=True)
class Priced:
    """The cheapest sharding at some price of memory.

    Attributes:
        choice: the option of each decision.
        seconds: seconds of a step, without the price of memory.
        bound: proven lower bound of seconds and the price of memory together.
        resident_bytes: bytes on one device between forward and backward pass, with one microbatch.
        saved_bytes: the part of `resident_bytes` that each microbatch saves.
        extra_bytes: bytes by which the peak exceeds `resident_bytes`.
    """

    choice: tuple[int, ...]
    seconds: float
    bound: float
    resident_bytes: float
    saved_bytes: float
    extra_bytes: float

    def bytes(self, in_flight: int) -> float:
        """Return the resident bytes with `in_flight` microbatches."""
        return self.resident_bytes + (in_flight - 1) * self.saved_bytes


class PricedProblem:
    """The selection problem of a step for any price of memory.

    Args:
        step: the step.
        costs: costs on its mesh.
        options: what a sharding may do.
        deferred: mesh axes along which gradients are completed once.
        point: number of the equation after the last one of the forward pass.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
    """

    def __init__(
        self,
        step: StepGraph,
        costs: MeshCosts,
        options: ShardingOptions,
        deferred: tuple[str, ...],
        point: int,
    ) -> None:
        self.step, self.options = step, options
        self._mesh = costs.mesh
        self.decisions = enumerate_decisions(step, costs, options, deferred)
        self._memory = StepMemory(step, self.decisions, costs.mesh)
        # Values that other layers compute or read count in the layer that saves them, if one does.
        self._point = point
        passing = {step.jaxpr.invars[i] for i in step.received_inputs}.difference(
            step.saved_for_backward
        )
        passing.update(
            v
            for o, v in enumerate(step.jaxpr.outvars)
            if o not in step.carried and isinstance(v, Var)
        )
        self._passing = passing
        self._resident = self._memory.capacity_constraint(point, np.inf, passing)
        self._saved = self._memory.saved(step.saved_for_backward)

    def solve(
        self, price: float, in_flight: int, tolerance: float, start: Priced | None = None
    ) -> Priced:
        """Return the cheapest choice if a resident byte costs `price` seconds per step.

        Args:
            price: seconds per byte.
            in_flight: number of microbatches in flight.
            tolerance: relative gap at which the solver may stop.
            start: a known solution, perhaps at another price.

        Raises:
            InfeasibleError, TimeoutError: see `solve`.
        """
        if self.options.mode != "solve":
            solution = propagate(self.decisions.problem())
        else:
            limit, gap = self.options.time_limit, _BRANCHING_GAP if tolerance else 0.0
            if price:
                problem, choice = self._priced(price, in_flight), start.choice if start else None
                solution = solve(problem, limit, tolerance, choice, branching_gap=gap)
            else:
                solution = self._unpriced.solve(limit, tolerance, gap)
        choice = solution.choice
        resident = self._resident.used(choice)
        return Priced(
            choice,
            seconds=self.decisions.problem().cost(choice),
            bound=(1 - (solution.gap or 0.0)) * solution.objective,
            resident_bytes=resident,
            saved_bytes=self._saved.used(choice),
            extra_bytes=self._memory.reserved_bytes(choice) - resident,
        )

    @cached_property
    def _unpriced(self) -> Solver:
        """The solver of the selection problem in which memory has no price."""
        return Solver(self.decisions.problem())

    def _priced(self, price: float, in_flight: int) -> SelectionProblem:
        """Return the selection problem with the price of memory in its costs."""
        nodes, edges = list(self.decisions.costs), dict(self.decisions.edges)
        for constraint, weight in ((self._resident, price), (self._saved, (in_flight - 1) * price)):
            for i, use in constraint.uses.items() if weight else ():
                nodes[i] = nodes[i] + weight * use
            for pair, use in constraint.pairs.items() if weight else ():
                edges[pair] = edges[pair] + weight * use
        return SelectionProblem(nodes, edges)

    def bound(self, parts: int, tolerance: float) -> float:
        """Return a lower bound of the seconds of a step.

        Args:
            parts: number of parts of a microbatch. Options that a part is too small for do not
                count.
            tolerance: relative gap at which the solver may stop.

        Raises:
            InfeasibleError, TimeoutError: see `solve`.
        """
        if self.options.mode != "solve":
            return self.solve(0.0, 1, tolerance).bound
        if parts == 1:
            return self._unpriced.solve(self.options.time_limit, tolerance).bound
        return solve(self._in_parts(parts), self.options.time_limit, tolerance).bound

    def bound_as_program(
        self, num_micro_batches: int, price: float, tolerance: float
    ) -> tuple[float, float]:
        """Return a lower bound of the seconds of a step and of priced memory, as one program.

        Memory counts between forward and backward pass. One program stores fewer values than a
        stage: its kernels may compute values again.

        Args:
            num_micro_batches: number of microbatches, at least as many as the step has.
            price: seconds per byte and step.
            tolerance: relative gap at which the solver may stop.

        Returns:
            The bound of both together, and the bytes of one device under a choice near it. At an
            infinite price they are a lower bound of the bytes of all choices.

        Raises:
            InfeasibleError, TimeoutError: see `solve`.
        """
        parts = num_micro_batches // self.step.num_micro_batches
        uses, pairs = self._uses_as_program(self.step.num_micro_batches / num_micro_batches)
        if price == inf:
            allowed = self._allowed(parts)
            return inf, sum(float(use[allowed[i]].min()) for i, use in uses.items())
        problem = self._in_parts(parts) if parts > 1 else self.decisions.problem()
        nodes = [cost + price * uses.get(i, 0.0) for i, cost in enumerate(problem.nodes)]
        edges = dict(problem.edges)
        edges.update((pair, edges[pair] + price * use) for pair, use in pairs.items())
        problem = SelectionProblem(nodes, edges)
        limit = self.options.time_limit
        solution = solve(problem, limit, tolerance, branching_gap=inf)
        used = CapacityConstraint(uses, np.inf, pairs).used(solution.choice)
        return solution.bound, used

    def _uses_as_program(self, share: float) -> tuple[Uses, Pairs]:
        """Return the bytes of options and of pairs of options; see `bound_as_program`."""
        stored, state = self._stored_as_program
        uses = {
            i: state[i] + share * (use - state[i]) if i in state else share * use
            for i, use in stored.uses.items()
        }
        return uses, {pair: share * use for pair, use in stored.pairs.items()}

    @cached_property
    def _stored_as_program(self) -> tuple[CapacityConstraint, Uses]:
        """Bytes between forward and backward pass as one program, and bytes of its state.

        Inputs that are not carried don't count: other layers may read them, too.
        """
        step = self.step
        memory = StepMemory(
            replace(
                step,
                cross_task_values=(),
                task_ends=(),
                saved_for_backward=(),
                saved_for_weights=(),
            ),
            self.decisions,
            self._mesh,
        )
        shared = set(step.jaxpr.invars).difference(step.state) | self._passing
        stored = memory.capacity_constraint(self._point, np.inf, shared, with_parts=True)
        state = memory.saved(var for var in step.state if var not in shared).uses
        return stored, {i: np.minimum(use, stored.uses.get(i, 0.0)) for i, use in state.items()}

    def _in_parts(self, parts: int) -> SelectionProblem:
        """Return the selection problem of a step whose microbatches are divided; see `bound`."""
        repeated = self._repeated_seconds
        nodes = [
            np.where(allowed, cost + (parts - 1) * again, np.inf)
            for allowed, cost, again in zip(
                self._allowed(parts), self.decisions.costs, repeated.nodes, strict=True
            )
        ]
        edges = dict(self.decisions.edges)
        for pair, again in repeated.edges.items():
            edges[pair] = edges[pair] + (parts - 1) * again
        return SelectionProblem(nodes, edges)

    def least_bytes(self, parts: int) -> float:
        """Return a lower bound of the peak bytes of every choice; see `bound`.

        Raises:
            InfeasibleError: a part is too small for all options of a decision.
        """
        return self._memory.lower_bound(self._allowed(parts))

    def least_resident_bytes(self, in_flight: int) -> float:
        """Return a lower bound of `Priced.bytes` of every choice."""
        uses = {i: np.array(use, float) for i, use in self._resident.uses.items()}
        for i, use in self._saved.uses.items() if in_flight > 1 else ():
            uses[i] = uses.get(i, 0.0) + (in_flight - 1) * use
        return sum(float(use.min()) for use in uses.values())

    @cached_property
    def least_saved_bytes(self) -> float:
        """Lower bound of the bytes that a microbatch saves for its backward pass."""
        return sum(float(use.min()) for use in self._saved.uses.values())

    def _allowed(self, parts: int) -> list[np.ndarray]:
        """Return for each decision which options divide a part of a microbatch evenly.

        Raises:
            InfeasibleError: a part is too small for all options of a decision.
        """
        allowed = [rows % parts == 0 for rows in self._rows]
        if not all(map(np.any, allowed)):
            raise InfeasibleError("the parts of a microbatch are too small for the mesh")
        return allowed

    @cached_property
    def _repeated_seconds(self) -> SelectionProblem:
        """Seconds of the choice that every microbatch takes, however small.

        They count the kernels that read no examples, such as accumulation, the resharding of values
        without a batch dim, such as weights, and the collectives that complete such values, such as
        gradients. These count only if the step accumulates gradients: in one microbatch no mesh
        choice defers them.
        """
        batch_dims = analyze(self.step).batch_dims
        micro = self.step.microbatching
        marks = dict(micro.marks) if micro else {}
        body = dict(micro.body) | marks if micro else {}
        whole_results = {n for n, eqn in body.items() if batch_dims.keys().isdisjoint(eqn.outvars)}
        repeated = {
            number
            for number in whole_results
            if batch_dims.keys().isdisjoint(variables(body[number].invars))
        }
        nodes = [np.zeros(len(cost)) for cost in self.decisions.costs]
        for number, (decision, *others), terms in self.decisions.shares:
            if others or number not in whole_results:
                continue
            compute, completing = terms
            if number in repeated:
                nodes[decision] = nodes[decision] + compute
            if number not in marks and self.step.num_micro_batches > 1:
                nodes[decision] = nodes[decision] + completing
        edges: dict[tuple[int, int], np.ndarray] = {}
        for use in self.decisions.uses:
            if use.eqn not in body or use.seconds is None:
                continue
            if body[use.eqn].invars[use.operand] in batch_dims:
                continue
            i, j, seconds = use.value.decision, use.decision, use.seconds
            if i == j:
                nodes[i] = nodes[i] + np.diagonal(seconds)
                continue
            pair, seconds = ((i, j), seconds) if i < j else ((j, i), seconds.T)
            edges[pair] = edges.get(pair, 0.0) + seconds
        return SelectionProblem(nodes, edges)

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        """Number of rows of a microbatch that one device has under each option of each decision.

        It is the greatest common divisor over the batch dims of all values that a decision places;
        0 if there are none.
        """
        batch_dims = analyze(self.step).batch_dims
        rows = [np.zeros(len(cost), int) for cost in self.decisions.costs]
        for var, placement in self.decisions.placements.items():
            if placement is None:
                continue
            for dim in batch_dims.get(var, ()):
                size = aval_of(var).shape[dim]
                ways = each_once(lambda spec, dim=dim: self._mesh.ways(spec[dim]), placement.specs)
                known = rows[placement.decision]
                rows[placement.decision] = np.gcd(known, size // np.array(ways))
        return rows

    def eqn_seconds(self, solution: Priced) -> tuple[float, ...]:
        """Return the seconds of each equation in a step."""
        return tuple(
            map(sum, self.decisions.seconds_by_equation(solution.choice, len(self.step.jaxpr.eqns)))
        )

    def specs(self, solution: Priced) -> list[Spec | None]:
        """Return the spec of each of `values_of` the step; None for values without a placement."""
        placements = (self.decisions.placements.get(var) for var in values_of(self.step))
        return [p.specs[solution.choice[p.decision]] if p else None for p in placements]


def values_of(step: StepGraph) -> list[Var]:
    """Return the inputs of a step and the results of its equations, in order."""
    return [*step.jaxpr.invars, *(var for eqn in step.jaxpr.eqns for var in eqn.outvars)]
