"""Intra-operator planning: the cheapest sharding of a traced step on a logical mesh."""

import time
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import Literal

from autopar.graph import Atom, aval_of
from autopar.sharding.costs import MeshCosts
from autopar.sharding.decisions import Decisions, Role, enumerate_decisions
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.problem import Solution
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
        gap: proven relative distance from the cheapest plan.
        solve_seconds: time spent planning.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    constraints: tuple[Constraint, ...]
    roles: tuple[Role, ...]
    seconds: float
    gap: float
    solve_seconds: float


def plan_shardings(step: StepGraph, mesh: LogicalMesh, model: CostModel, options: ShardingOptions = AUTO) -> Shardings:
    """The cheapest sharding of `step` on `mesh` under `model`, among those that `options` allow.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
        InfeasibleError, TimeoutError: see `solve`.
    """
    start = time.perf_counter()
    decisions = enumerate_decisions(step, MeshCosts(mesh, model), options)
    solution = solve(decisions.problem(), options.time_limit)
    return _shardings(step, decisions, solution, time.perf_counter() - start)


def _shardings(step: StepGraph, decisions: Decisions, solution: Solution, seconds: float) -> Shardings:
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
        gap=solution.gap,
        solve_seconds=seconds,
    )
