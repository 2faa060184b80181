"""The planner's choice problem of a step, with the options that a plan took.

Nothing is solved again: the decisions are enumerated as the planner did, and the plan tells which option each of them took.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.analysis.replay import Replay, replay
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import Planned
from autopar.plan import PlanError
from autopar.sharding.mesh_costs import MeshCosts, Seconds
from autopar.sharding.objective import Decisions, Use, enumerate_decisions
from autopar.sharding.options import ShardingOptions
from simulator.costs.cost_model import CostModel


@dataclass(frozen=True)
class Choices:
    """What a plan chose.

    Attributes:
        replay: the plan played over the step.
        decisions: the choice problem.
        owner: for each decision that is not an input's, the number of the equation that decides.
        taken: the option of each decision.
        reads: for each equation (None: the outputs) the uses of values by it.
    """

    replay: Replay
    decisions: Decisions
    owner: dict[int, int]
    taken: tuple[int, ...]
    reads: dict[int | None, list[Use]]
    _seconds: tuple[Seconds, ...]
    _neighbours: dict[int, list[tuple[int, np.ndarray]]]

    def seconds(self, decision: int) -> Seconds:
        """What a decision costs, everything that follows it included; all of them add up to the plan's predicted time."""
        return self._seconds[decision]

    def extra_seconds(self, decision: int) -> np.ndarray:
        """For each option of a decision, how much longer the step would take with it, all other decisions staying."""
        total = np.array(self.decisions.costs[decision], float)
        for other, cost in self._neighbours[decision]:
            total = total + cost[:, self.taken[other]]
        return total - total[self.taken[decision]]


def recover(planned: Planned, model: CostModel, options: ShardingOptions) -> Choices:
    """The choices of a plan.

    Args:
        model, options: what the plan was made with.

    Raises:
        PlanError: the plan is for another step, leaves all choices to XLA, or takes options that the planner would not have
            under `options`.
    """
    if options.mode == "manual":
        raise PlanError(
            "nothing inside the step was chosen: the plan pins inputs and outputs, XLA propagates them"
        )
    step, played = planned.step, replay(planned)
    (stage,) = planned.plan.stages
    decisions = enumerate_decisions(step, MeshCosts(played.mesh, model), options, stage.deferred)
    reads: dict[int | None, list[Use]] = defaultdict(list)
    for use in decisions.uses:
        reads[use.eqn].append(use)
    neighbours: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for (i, j), cost in decisions.edges.items():
        neighbours[i].append((j, cost))
        neighbours[j].append((i, cost.T))
    owner = _owners(decisions, played)
    taken = _taken(step, decisions, played, owner, reads)
    moves = _moves(step, decisions, taken)
    split = []
    for i, k in enumerate(taken):
        compute, communication, inside = decisions.seconds(i, k)
        split.append(Seconds(compute, communication, inside + float(moves[i])))
    return Choices(played, decisions, owner, taken, reads, tuple(split), neighbours)


def _moves(step: StepGraph, decisions: Decisions, taken: Sequence[int]) -> np.ndarray:
    """Seconds of the edges, for each decision those of the values that it reads with another spec than they have."""
    moved: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in decisions.uses:
        i, j = use.value.decision, use.decision
        if i != j and use.value.specs[taken[i]] != use.required[taken[j]]:
            atoms = step.jaxpr.outvars if use.eqn is None else step.jaxpr.eqns[use.eqn].invars
            aval = aval_of(atoms[use.operand])
            moved[min(i, j), max(i, j)][j] += array_bytes(aval.shape, aval.dtype)
    seconds = np.zeros(len(taken))
    for (i, j), cost in decisions.edges.items():
        readers = moved[i, j] or {j: 1}
        for (
            reader,
            num_bytes,
        ) in readers.items():  # in both directions only where two decisions read from one another
            seconds[reader] += float(cost[taken[i], taken[j]]) * num_bytes / sum(readers.values())
    return seconds


def _owners(decisions: Decisions, played: Replay) -> dict[int, int]:
    """The first equation whose result a decision places, for those that no input makes."""
    inputs = {placement.decision for placement in decisions.inputs}
    owner: dict[int, int] = {}
    for each in played.equations:
        for placement in map(decisions.placements.get, each.eqn.outvars):
            if placement is not None and placement.decision not in inputs:
                owner.setdefault(placement.decision, each.number)
    return owner


def _taken(
    step: StepGraph,
    decisions: Decisions,
    played: Replay,
    owner: dict[int, int],
    reads: dict[int | None, list[Use]],
) -> tuple[int, ...]:
    """The option of each decision that agrees with the plan; the first for constants, which have no other."""
    taken = [0] * len(decisions.costs)
    for placement, var, path in zip(
        decisions.inputs, step.jaxpr.invars, step.in_paths, strict=True
    ):
        fits = [spec == played.values[var] for spec in placement.specs]
        taken[placement.decision] = _fitting(path, fits, decisions.costs[placement.decision])
    for decision, number in owner.items():
        each = played.equations[number]
        placements = [decisions.placements[var] for var in each.eqn.outvars]
        fits = [
            all(
                use.required[k] == each.operands[use.operand]
                for use in reads[number]
                if use.decision == decision
            )
            and all(
                p is None or p.decision != decision or p.specs[k] == spec
                for p, spec in zip(placements, each.results, strict=True)
            )
            for k in range(len(decisions.costs[decision]))
        ]
        taken[decision] = _fitting(
            f"equation {number}, {each.name},", fits, decisions.costs[decision]
        )
    return tuple(taken)


def _fitting(name: str, fits: Sequence[bool], costs: np.ndarray) -> int:
    """The cheapest of the options that fit."""
    options = [k for k, fit in enumerate(fits) if fit]
    if not options:
        raise PlanError(
            f"the plan shards {name} in a way that the planner does not consider under these options; give the options that it"
            " was made with (options=ShardingOptions() allows the most)"
        )
    return min(options, key=lambda k: costs[k])
