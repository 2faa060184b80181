"""Intra-operator planning: the cheapest sharding of a traced step on a logical mesh."""

import math
import time
from dataclasses import dataclass, replace
from typing import Literal as OneOf

from jax.extend.core import Literal

from autopar.graph import Atom, aval_of
from autopar.sharding.costs import MeshCosts
from autopar.sharding.decisions import Decisions, Role, enumerate_decisions
from autopar.sharding.memory import Memory
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.problem import ChoiceProblem, InfeasibleError, Limit, Solution
from autopar.sharding.solver import solve
from autopar.sharding.spec import LogicalMesh, Spec, replicated
from autopar.trace import StepGraph
from simulator.costs import CostModel


@dataclass(frozen=True, slots=True)
class Constraint:
    """A sharding to impose where the step runs.

    Attributes:
        eqn: number of the equation in the flat jaxpr.
        side: "in" to reshard operand number `index` before the equation reads it, "out" for result number `index`.
    """

    eqn: int
    side: OneOf["in", "out"]
    index: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class Shardings:
    """A solved sharding of a step.

    Attributes:
        inputs: spec of each input of the flat jaxpr.
        outputs: spec of each output.
        constraints: shardings of intermediate values.
        roles: for each input "batch", "parameter", "state" or "other".
        seconds: what the cost model says the step takes.
        peak_bytes: estimate of what one device needs.
        gap: proven relative distance from the cheapest plan.
        solve_seconds: time spent planning.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    constraints: tuple[Constraint, ...]
    roles: tuple[Role, ...]
    seconds: float
    peak_bytes: float
    gap: float
    solve_seconds: float


class MemoryBudgetError(InfeasibleError):
    """No plan that is allowed fits into the memory of a device.

    Attributes:
        budget: bytes that were given; `least`: bytes below which no plan gets.
    """

    def __init__(self, budget: float, least: float) -> None:
        self.budget, self.least = budget, least
        needs = f"at least {least / 1e9:.3g} GB" if least > budget else "more than that"
        super().__init__(
            f"no plan fits into {budget / 1e9:.3g} GB per device: every one that is allowed needs {needs}. More devices, a smaller"
            " batch, more microbatches (num_micro_batches with autopar.grad), jax.checkpoint around layers, or a method that"
            " shards more (ShardParallel, Zero3Parallel) would help"
        )


def plan_shardings(
    step: StepGraph,
    mesh: LogicalMesh,
    model: CostModel,
    options: ShardingOptions = AUTO,
    memory_budget: float = math.inf,
) -> Shardings:
    """The cheapest sharding of `step` on `mesh` under `model`, among those that `options` allow and `memory_budget` holds.

    Args:
        memory_budget: bytes of one device that the step may use.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
        MemoryBudgetError: no plan fits into `memory_budget`.
        InfeasibleError, TimeoutError: see `solve`.
    """
    start = time.perf_counter()
    decisions = enumerate_decisions(step, MeshCosts(mesh, model), options)
    memory = Memory(step, decisions, mesh)
    solution, peak_bytes = _solve_within(memory, decisions.problem(), memory_budget, options.time_limit)
    return _shardings(step, decisions, solution, peak_bytes, time.perf_counter() - start)


def _solve_within(memory: Memory, problem: ChoiceProblem, budget: float, time_limit: float) -> tuple[Solution, float]:
    """The cheapest choice whose peak memory is within `budget`, and that peak.

    Limits are added where a solution breaks them, moment by moment: few moments ever matter. What copies kept from another
    moment took is no part of a limit; it is taken off its bound.
    """
    limits: dict[int, Limit] = {}
    while True:
        try:
            solution = solve(replace(problem, limits=tuple(limits.values())), time_limit)
        except InfeasibleError as error:
            if not limits:
                raise
            raise MemoryBudgetError(budget, memory.least()) from error
        used = memory.of_values(solution.choice) + memory.of_copies(solution.choice)
        moment = int(used.argmax())
        if used[moment] <= budget:
            return solution, float(used[moment])
        kept = used[moment] - memory.limit(moment, budget).used(solution.choice)
        tightened = 0.98 * limits[moment].bound if moment in limits else budget
        limits[moment] = memory.limit(moment, min(tightened, budget - kept))


def _shardings(
    step: StepGraph, decisions: Decisions, solution: Solution, peak_bytes: float, seconds: float
) -> Shardings:
    choice = solution.choice
    constraints = [
        Constraint(eqn, "out", r, placement.specs[choice[placement.decision]])
        for eqn, results in decisions.decided
        for r, placement in enumerate(results)
        if placement is not None
    ]

    def output_spec(o: int, atom: Atom) -> Spec:
        if o in step.carried:
            placement = decisions.inputs[step.carried[o]]
        else:
            placement = None if isinstance(atom, Literal) else decisions.placements[atom]
        return placement.specs[choice[placement.decision]] if placement else replicated(len(aval_of(atom).shape))

    for use in decisions.uses:
        present = use.value.specs[choice[use.value.decision]]
        required = use.required[choice[use.decision]]
        if use.eqn is not None and present != required:
            constraints.append(Constraint(use.eqn, "in", use.operand, required))
    return Shardings(
        inputs=tuple(p.specs[choice[p.decision]] for p in decisions.inputs),
        outputs=tuple(output_spec(o, atom) for o, atom in enumerate(step.jaxpr.outvars)),
        constraints=tuple(sorted(constraints, key=lambda c: (c.eqn, c.side, c.index))),
        roles=tuple(decisions.roles),
        seconds=solution.objective,
        peak_bytes=peak_bytes,
        gap=solution.gap,
        solve_seconds=seconds,
    )
