"""Intra-operator planning: the cheapest sharding of a traced step on a logical mesh."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from jax.extend.core import Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.host_memory import to_host_p
from autopar.ir.spec import LogicalMesh, Spec
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.progress import progress_part
from autopar.sharding.dataflow import InputRole
from autopar.sharding.deferred_sync import Axes, candidates, check_parts
from autopar.sharding.imposed_constraints import Constraint, chosen_spec, imposed_constraints
from autopar.sharding.mesh_costs import MeshCosts, Seconds
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.selection_problem import (
    InfeasibleError,
    NoFasterError,
    Solution,
)
from autopar.sharding.solve_within_memory import (
    Start,
    propagate_within_memory,
    solve_within_memory,
)
from autopar.sharding.step_decisions import Decisions
from autopar.sharding.step_memory import StepMemory
from simulator.costs.cost_model import CostModel
from simulator.memory import Role as MemoryRole


@dataclass(frozen=True, slots=True)
class Shardings:
    """A solved sharding of a step.

    Attributes:
        inputs: spec of each input of the flat jaxpr.
        outputs: spec of each output.
        constraints: shardings of intermediate values.
        roles: role of each input.
        seconds: predicted seconds of the step.
        split: `seconds` by compute and communication.
        peak_bytes: predicted peak memory of one device.
        gap: proven relative distance from the optimum; None if nothing was proven.
        solve_seconds: seconds spent planning.
        deferred: mesh axes along which gradients are completed once, after all microbatches.
        warnings: what the plan could not do, and why.
        eqn_seconds: predicted seconds of each equation, with the resharding of its operands.
        saved_bytes: bytes on one device for each microbatch in flight in a stage of a pipeline, as
            the solver counts them (`StepGraph.saved_in_flight`).
        waiting_bytes: bytes on one device of a microbatch that waits for its backward pass, and of
            one that waits for its weight gradients alone.
        roles_at_peak: `peak_bytes` by memory role.
        memory_limited: whether memory was too short for the cheapest sharding.
        specs: the spec of each value that has one, if it was asked for.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    constraints: tuple[Constraint, ...]
    roles: tuple[InputRole, ...]
    seconds: float
    split: Seconds
    peak_bytes: float
    gap: float | None
    solve_seconds: float
    deferred: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    eqn_seconds: tuple[float, ...] = ()
    saved_bytes: float = 0.0
    waiting_bytes: tuple[float, float] = (0.0, 0.0)
    roles_at_peak: Mapping[MemoryRole, float] = field(default_factory=dict)
    memory_limited: bool = False
    specs: Mapping[Var, Spec] = field(default_factory=dict, repr=False)


def plan_shardings(
    step: StepGraph,
    mesh: LogicalMesh,
    model: CostModel,
    options: ShardingOptions = AUTO,
    memory_budget: float = math.inf,
    costs: MeshCosts | None = None,
    start: Start | None = None,
    with_specs: bool = False,
    limit: float = math.inf,
) -> Shardings:
    """Return the cheapest sharding of `step` on `mesh` that fits into `memory_budget`.

    Args:
        step: the traced step.
        mesh: the logical mesh.
        model: the cost model of the mesh's devices and network.
        options: what a sharding may do.
        memory_budget: bytes of one device that the step may use.
        costs: `model` on `mesh`, with its memoized costs; None: a new one.
        start: a sharding to start from. Its deferred axes are kept if that fits.
        with_specs: whether to return the spec of every value, too.
        limit: seconds of a known plan; only faster ones are looked for.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
        MemoryBudgetError: no plan fits into `memory_budget`.
        NoFasterError: no plan that fits takes less than `limit`.
        InfeasibleError, TimeoutError: see `solve`.
    """
    began = time.perf_counter()
    costs = costs or MeshCosts(mesh, model, options.forbidden)
    best, refused = _cheapest(step, costs, options, memory_budget, start, limit)
    divided = any(best.inputs[i][0] for i in step.batch)
    if step.microbatching and divided and not best.deferred and refused is not None:
        best = replace(best, warnings=(f"gradients are completed in every microbatch: {refused}",))
    is_offloading = any(eqn.primitive is to_host_p for eqn in step.jaxpr.eqns)
    specs = best.specs if with_specs or is_offloading else {}
    return replace(best, solve_seconds=time.perf_counter() - began, specs=specs)


def _cheapest(
    step: StepGraph,
    costs: MeshCosts,
    options: ShardingOptions,
    budget: float,
    start: Start | None,
    limit: float,
) -> tuple[Shardings, ValueError | None]:
    """Return the cheapest plan over all deferred axes, and why deferring failed if it did."""
    if start is not None:
        with suppress(InfeasibleError):
            return _plan_deferring(step, costs, options, budget, start.deferred, start), None
    refused: ValueError | None = None
    is_solved = options.mode == "solve"
    sets_of_axes = [*candidates(step, costs.mesh, options.data_parallel)] if is_solved else []
    while True:
        plan, error = _cheapest_of(step, costs, options, budget, sets_of_axes, limit)
        try:
            check_parts(step, costs.mesh, plan.deferred)
        except MicrobatchError as reason:
            refused = refused or reason
            sets_of_axes.remove(plan.deferred)
        else:
            return plan, refused or error


def _cheapest_of(
    step: StepGraph,
    costs: MeshCosts,
    options: ShardingOptions,
    budget: float,
    sets_of_axes: Sequence[Axes],
    limit: float,
) -> tuple[Shardings, ValueError | None]:
    """Return the cheapest plan with one of these sets of deferred axes, or with none.

    Pure data parallelism always defers if possible, so it is not compared with plans that don't.

    Returns:
        The plan, and why deferring failed if it did.
    """
    plans: list[Shardings] = []
    errors: list[ShardingError | InfeasibleError] = []
    num_solves = len(sets_of_axes) + 1
    for number, deferred in enumerate((*sets_of_axes, ())):
        if plans and not deferred and options.data_parallel:
            break
        try:
            with progress_part(number / num_solves, (number + 1) / num_solves):
                least = min([limit, *(plan.seconds for plan in plans)])
                plans.append(_plan_deferring(step, costs, options, budget, deferred, limit=least))
        except (ShardingError, InfeasibleError) as error:
            errors.append(error)
    if not plans:
        slower = [error for error in errors if isinstance(error, NoFasterError)]
        raise max(slower, key=lambda error: error.is_limited, default=errors[-1])
    refused = None if any(plan.deferred for plan in plans) else next(iter(errors), None)
    return min(plans, key=lambda plan: plan.seconds), refused


def _plan_deferring(
    step: StepGraph,
    costs: MeshCosts,
    options: ShardingOptions,
    budget: float,
    deferred: Axes,
    start: Start | None = None,
    limit: float = math.inf,
) -> Shardings:
    """Return the cheapest plan that defers along exactly these axes."""
    with progress_part(0, _ENUMERATION, "costs of shardings"):
        decisions = enumerate_decisions(step, costs, options, deferred)
        memory = StepMemory(step, decisions, costs.mesh)
    if options.mode == "solve":
        with progress_part(_ENUMERATION, 1, "solving"):
            solution, peak_bytes = solve_within_memory(
                memory, decisions.problem(), budget, options, start, limit
            )
    else:
        solution, peak_bytes = propagate_within_memory(memory, decisions.problem(), budget)
    return replace(
        _shardings(step, decisions, solution, peak_bytes),
        deferred=deferred,
        saved_bytes=memory.saved(step.saved_in_flight).used(solution.choice),
        waiting_bytes=(
            memory.saved(step.saved_for_backward).used(solution.choice),
            memory.saved(step.saved_for_weights).used(solution.choice),
        ),
        roles_at_peak=memory.roles_at_peak(solution.choice),
    )


_ENUMERATION = 0.65
"""Usual share of the enumeration of candidates in the time of a solve."""


def _split(decisions: Decisions, choice: Sequence[int]) -> Seconds:
    """Return the seconds of a choice by compute, communication and resharding."""
    seconds = (decisions.seconds(decision, option) for decision, option in enumerate(choice))
    compute, communication, inside = map(sum, zip((0.0, 0.0, 0.0), *seconds, strict=True))
    edges = sum(float(cost[choice[i], choice[j]]) for (i, j), cost in decisions.edges.items())
    return Seconds(compute, communication, inside + edges)


def _shardings(
    step: StepGraph, decisions: Decisions, solution: Solution, peak_bytes: float
) -> Shardings:
    """Return the specs and constraints that impose a solution."""
    choice = solution.choice

    def output_spec(o: int, atom: Atom) -> Spec:
        placement = decisions.outputs.get(o)
        if placement is None and not isinstance(atom, Literal):
            placement = decisions.placements[atom]
        return chosen_spec(placement, choice, aval_of(atom).ndim)

    return Shardings(
        inputs=tuple(chosen_spec(placement, choice, 0) for placement in decisions.inputs),
        outputs=tuple(output_spec(o, atom) for o, atom in enumerate(step.jaxpr.outvars)),
        constraints=imposed_constraints(step, decisions, choice),
        roles=tuple(decisions.roles),
        seconds=solution.objective,
        split=_split(decisions, choice),
        peak_bytes=peak_bytes,
        gap=solution.gap,
        solve_seconds=0.0,
        memory_limited=solution.is_limited,
        specs={
            var: placement.specs[choice[placement.decision]]
            for var, placement in decisions.placements.items()
            if placement is not None
        },
        eqn_seconds=tuple(map(sum, decisions.seconds_by_equation(choice, len(step.jaxpr.eqns)))),
    )
