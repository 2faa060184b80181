"""Intra-operator planning: the cheapest sharding of a traced step on a logical mesh."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, replicated
from autopar.ir.step_graph import MicrobatchError, StepGraph
from autopar.primitives import is_partitioned_wrongly
from autopar.sharding.dataflow import InputRole
from autopar.sharding.deferred_sync import Axes, candidates, check_parts
from autopar.sharding.heuristic import propagate
from autopar.sharding.mesh_costs import MeshCosts, Seconds
from autopar.sharding.objective import Decisions, enumerate_decisions
from autopar.sharding.options import AUTO, ShardingOptions
from autopar.sharding.pins import ShardingError
from autopar.sharding.reshard_hoisting import passes_moves
from autopar.sharding.selection_problem import (
    CapacityConstraint,
    InfeasibleError,
    SelectionProblem,
    Solution,
)
from autopar.sharding.solver import solve
from autopar.sharding.step_memory import StepMemory
from simulator.costs.cost_model import CostModel
from simulator.memory import Role as MemoryRole


@dataclass(frozen=True, slots=True)
class Constraint:
    """A sharding to impose where the step runs.

    Attributes:
        eqn: number of the equation in the flat jaxpr.
        side: "in" reshards operand `index` before the equation reads it, "out" constrains result
            `index`.
        index: position of the operand or result.
        spec: its sharding.
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
        roles: role of each input.
        seconds: predicted seconds of the step.
        split: `seconds` by compute and communication.
        peak_bytes: predicted peak memory of one device.
        gap: proven relative distance from the optimum; None if nothing was proven.
        solve_seconds: seconds spent planning.
        deferred: mesh axes along which gradients are completed once, after all microbatches.
        warnings: what the plan could not do, and why.
        eqn_seconds: predicted seconds of each equation, with the resharding of its operands.
        saved_bytes: bytes per microbatch that a stage of a pipeline saves for the backward pass, on
            one device.
        roles_at_peak: `peak_bytes` by memory role.
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
    roles_at_peak: Mapping[MemoryRole, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """A known sharding to start from, found for a part of the step.

    Attributes:
        deferred: mesh axes along which gradients are completed once.
        specs: specs of values.
        bound: lower bound of the seconds of every sharding.
    """

    deferred: Axes
    specs: Mapping[Var, Spec]
    bound: float


class MemoryBudgetError(InfeasibleError):
    """No allowed plan fits into the memory budget of a device.

    Attributes:
        budget: bytes that were given.
        least: lower bound of the peak bytes of every allowed plan.
        step: name of the step.
    """

    def __init__(self, budget: float, least: float, step: str = "the step") -> None:
        self.budget, self.least, self.step = budget, least, step
        needs = f"at least {least / 1e9:.3g} GB" if least > budget else "more than that"
        super().__init__(
            f"no plan for {step} fits into {budget / 1e9:.3g} GB per device: every one that is"
            f" allowed needs {needs}. More devices, a smaller batch, more microbatches"
            " (num_micro_batches with autopar.grad), jax.checkpoint around layers, or a method that"
            " shards more (ShardParallel, Zero3Parallel) would help"
        )


def plan_shardings(
    step: StepGraph,
    mesh: LogicalMesh,
    model: CostModel,
    options: ShardingOptions = AUTO,
    memory_budget: float = math.inf,
    costs: MeshCosts | None = None,
    start: Start | None = None,
) -> Shardings:
    """Return the cheapest sharding of `step` on `mesh` that fits into `memory_budget`.

    Args:
        step: the traced step.
        mesh: the logical mesh.
        model: the cost model of the mesh's devices and network.
        options: what a sharding may do.
        memory_budget: bytes of one device that the step may use.
        costs: `model` on `mesh`, with its memoised costs; None: a new one.
        start: a sharding to start from. Its deferred axes are kept if that fits.

    Raises:
        MissingRuleError, ShardingError: see `enumerate_decisions`.
        MemoryBudgetError: no plan fits into `memory_budget`.
        InfeasibleError, TimeoutError: see `solve`.
    """
    began = time.perf_counter()
    costs = costs or MeshCosts(mesh, model, options.forbidden)
    best, refused = _cheapest(step, costs, options, memory_budget, start)
    divided = any(best.inputs[i][0] for i in step.batch)
    if step.microbatching and divided and not best.deferred and refused is not None:
        best = replace(best, warnings=(f"gradients are completed in every microbatch: {refused}",))
    return replace(best, solve_seconds=time.perf_counter() - began)


def _cheapest(
    step: StepGraph, costs: MeshCosts, options: ShardingOptions, budget: float, start: Start | None
) -> tuple[Shardings, ValueError | None]:
    """Return the cheapest plan over all deferred axes, and why deferring failed if it did.

    Pure data parallelism always defers if possible, so it is not compared with plans that don't.
    """
    refused: ValueError | None = None
    if start is not None:
        with suppress(InfeasibleError):
            return _plan_deferring(step, costs, options, budget, start.deferred, start), None
    plans = []
    for deferred in (
        candidates(step, costs.mesh, options.data_parallel) if options.mode == "solve" else ()
    ):
        try:
            plans.append(_plan_deferring(step, costs, options, budget, deferred))
        except (ShardingError, InfeasibleError) as error:
            refused = refused or error
    try:
        if not plans or not options.data_parallel:
            plans.append(_plan_deferring(step, costs, options, budget, ()))
    except (ShardingError, InfeasibleError):
        if not plans:
            raise
    if any(plan.deferred for plan in plans):
        refused = None
    for plan in sorted(plans, key=lambda plan: plan.seconds):
        try:
            check_parts(step, costs.mesh, plan.deferred)
        except MicrobatchError as error:
            refused = refused or error
        else:
            return plan, refused
    return _plan_deferring(step, costs, options, budget, ()), refused


def _plan_deferring(
    step: StepGraph,
    costs: MeshCosts,
    options: ShardingOptions,
    budget: float,
    deferred: Axes,
    start: Start | None = None,
) -> Shardings:
    """Return the cheapest plan that defers along exactly these axes."""
    decisions = enumerate_decisions(step, costs, options, deferred)
    memory = StepMemory(step, decisions, costs.mesh)
    if options.mode == "solve":
        solution, peak_bytes = _solve_within(memory, decisions.problem(), budget, options, start)
    else:
        solution, peak_bytes = _propagate_within(memory, decisions.problem(), budget)
    return replace(
        _shardings(step, decisions, solution, peak_bytes),
        deferred=deferred,
        saved_bytes=memory.saved_for_backward().used(solution.choice),
        roles_at_peak=memory.roles_at_peak(solution.choice),
    )


def _solve_within(
    memory: StepMemory,
    problem: SelectionProblem,
    budget: float,
    options: ShardingOptions,
    start: Start | None,
) -> tuple[Solution, float]:
    """Return the cheapest choice whose peak memory is within `budget`, and that peak.

    Capacity constraints are generated lazily: one is added at the program point where a solution
    exceeds the budget most, until none does. Few points ever need one. Resharded copies that stay
    alive across a point are not variables of its constraint; their bytes are subtracted from its
    bound.
    """

    def allowed(choice: Sequence[int]) -> bool:
        return math.isinf(budget) or bool(memory.live_bytes(choice).max() <= budget)

    first = _like(start.specs, memory.decisions, problem) if start else None
    if start and first:
        peak = float(memory.live_bytes(first.choice).max())
        if peak <= budget and start.bound >= (1 - options.tolerance) * first.objective:
            gap = max(0.0, 1 - start.bound / first.objective) if first.objective else 0.0
            return replace(first, gap=gap), peak
    constraints: dict[int, CapacityConstraint] = {}
    bound = start.bound if start else -math.inf
    while True:
        constrained = replace(problem, limits=tuple(constraints.values()))
        try:
            solution = solve(
                constrained,
                options.time_limit,
                options.tolerance,
                first.choice if first else None,
                bound,
                allowed,
            )
        except InfeasibleError as error:
            if not constraints:
                raise
            raise MemoryBudgetError(budget, memory.lower_bound(), memory.step.name) from error
        peaks = memory.live_bytes(solution.choice)
        point = int(peaks.argmax())
        if peaks[point] <= budget:
            return solution, float(peaks[point])
        bound = max(bound, solution.bound)
        modelled = memory.capacity_constraint(point, budget).used(solution.choice)
        tightened = 0.98 * constraints[point].bound if point in constraints else budget
        capacity = min(tightened, budget - (peaks[point] - modelled))
        constraints[point] = memory.capacity_constraint(point, capacity)


def _like(
    specs: Mapping[Var, Spec], decisions: Decisions, problem: SelectionProblem
) -> Solution | None:
    """Return the cheapest choice in which values have the given specs, where such options exist.

    None if these options exclude one another.
    """
    allowed = [np.ones(len(cost), bool) for cost in problem.nodes]
    for var, placement in decisions.placements.items():
        if placement is not None and var in specs:
            matches = np.array([spec == specs[var] for spec in placement.specs])
            if (allowed[placement.decision] & matches).any():
                allowed[placement.decision] &= matches
    nodes = [
        np.where(mask, cost, np.inf) for mask, cost in zip(allowed, problem.nodes, strict=True)
    ]
    try:
        solution = solve(SelectionProblem(nodes, problem.edges))
    except InfeasibleError:
        return None
    return replace(solution, objective=problem.cost(solution.choice))


def _split(decisions: Decisions, choice: Sequence[int]) -> Seconds:
    """Return the seconds of a choice by compute, communication and resharding."""
    seconds = (decisions.seconds(decision, option) for decision, option in enumerate(choice))
    compute, communication, inside = map(sum, zip((0.0, 0.0, 0.0), *seconds, strict=True))
    edges = sum(float(cost[choice[i], choice[j]]) for (i, j), cost in decisions.edges.items())
    return Seconds(compute, communication, inside + edges)


def _propagate_within(
    memory: StepMemory, problem: SelectionProblem, budget: float
) -> tuple[Solution, float]:
    """Return the choice of sharding propagation from the inputs, and its peak memory.

    Raises:
        MemoryBudgetError: the peak exceeds `budget`.
    """
    solution = propagate(problem)
    peak = float(memory.live_bytes(solution.choice).max())
    if peak > budget:
        raise MemoryBudgetError(budget, peak, memory.step.name)
    return solution, peak


def _shardings(
    step: StepGraph, decisions: Decisions, solution: Solution, peak_bytes: float
) -> Shardings:
    """Return the specs and constraints that impose a solution."""
    choice = solution.choice
    pinned: dict[Var, Constraint] = {}
    for eqn, results in decisions.decided:
        for r, placement in enumerate(results):
            if placement is not None:
                spec = placement.specs[choice[placement.decision]]
                pinned[step.jaxpr.eqns[eqn].outvars[r]] = Constraint(eqn, "out", r, spec)
    made_by = {
        var: (n, r) for n, eqn in enumerate(step.jaxpr.eqns) for r, var in enumerate(eqn.outvars)
    }
    deciding = {eqn for eqn, _ in decisions.decided}
    moves = []
    for use in decisions.uses:
        present = use.value.specs[choice[use.value.decision]]
        required = use.required[choice[use.decision]]
        if use.eqn is None or (present == required and use.eqn not in deciding):
            continue
        if present != required:
            moves.append(Constraint(use.eqn, "in", use.operand, required))
        # A value without a decision of its own is constrained where an equation reshards it, or
        # decides by it. Otherwise the partitioner may compute it resharded, and reshard it back for
        # the other readers.
        var = step.jaxpr.eqns[use.eqn].invars[use.operand]
        if isinstance(var, Var) and var in made_by and var not in pinned:
            pinned[var] = Constraint(made_by[var][0], "out", made_by[var][1], present)

    moves = set(_hoisted(step, moves, pinned))
    # Equations that the partitioner gets wrong run on shards, which need the specs of all operands.
    for use in decisions.uses:
        if use.eqn is not None and is_partitioned_wrongly(step.jaxpr.eqns[use.eqn]):
            moves.add(Constraint(use.eqn, "in", use.operand, use.required[choice[use.decision]]))
    for var in step.cross_task_values:
        placement = decisions.placements[var]
        spec = (
            placement.specs[choice[placement.decision]]
            if placement
            else replicated(aval_of(var).ndim)
        )
        pinned.setdefault(var, Constraint(made_by[var][0], "out", made_by[var][1], spec))

    def output_spec(o: int, atom: Atom) -> Spec:
        placement = decisions.outputs.get(o)
        if placement is None and not isinstance(atom, Literal):
            placement = decisions.placements[atom]
        return (
            placement.specs[choice[placement.decision]]
            if placement
            else replicated(len(aval_of(atom).shape))
        )

    return Shardings(
        inputs=tuple(p.specs[choice[p.decision]] for p in decisions.inputs),
        outputs=tuple(output_spec(o, atom) for o, atom in enumerate(step.jaxpr.outvars)),
        constraints=tuple(
            sorted([*pinned.values(), *moves], key=lambda c: (c.eqn, c.side, c.index))
        ),
        roles=tuple(decisions.roles),
        seconds=solution.objective,
        split=_split(decisions, choice),
        peak_bytes=peak_bytes,
        gap=solution.gap,
        solve_seconds=0.0,
        eqn_seconds=tuple(map(sum, decisions.seconds_by_equation(choice, len(step.jaxpr.eqns)))),
    )


def _hoisted(
    step: StepGraph, moves: list[Constraint], pinned: dict[Var, Constraint]
) -> list[Constraint]:
    """Hoist reshardings: if all readers reshard a result alike, reshard the equation's operand."""
    eqns = step.jaxpr.eqns
    readers = Counter(atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var))
    moves_of: dict[Atom, list[Constraint]] = defaultdict(list)
    for move in moves:
        moves_of[eqns[move.eqn].invars[move.index]].append(move)
    for number, eqn in enumerate(eqns):
        if not passes_moves(eqn) or eqn.outvars[0] in step.jaxpr.outvars:
            continue
        result = eqn.outvars[0]
        moves_of_result = moves_of.get(result, [])
        specs = {move.spec for move in moves_of_result}
        if len(moves_of_result) == readers[result] and len(specs) == 1:
            (spec,) = specs
            moves_of[result] = [Constraint(number, "in", 0, spec)]
            pinned[result] = Constraint(number, "out", 0, spec)
    return [move for moves in moves_of.values() for move in moves]
