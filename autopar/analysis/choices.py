"""The planner's selection problem of a step, with the options that a plan selects.

Nothing is solved: the decisions are enumerated as in the planner, and the shardings of the plan
identify the option of each decision.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.analysis.replay import Replay, replay
from autopar.ir.array_sizes import value_bytes
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import Planned
from autopar.plan import PlanError
from autopar.sharding.mesh_costs import MeshCosts, Seconds
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import ShardingOptions
from autopar.sharding.step_decisions import Decisions, Use
from simulator.costs.cost_model import CostModel


@dataclass(frozen=True)
class Choices:
    """The decisions of a plan.

    Attributes:
        replay: the step with the shardings of the plan.
        decisions: the selection problem.
        owner: for each decision about an equation, rather than an input, its number.
        selected: the option of each decision that the plan selects.
        reads: for each equation the uses of values by it; uses by the outputs are under None.
    """

    replay: Replay
    decisions: Decisions
    owner: dict[int, int]
    selected: tuple[int, ...]
    reads: dict[int | None, list[Use]]
    _seconds: tuple[Seconds, ...]
    _neighbours: dict[int, list[tuple[int, np.ndarray]]]

    def seconds(self, decision: int) -> Seconds:
        """Return the seconds of a decision and of all equations that follow it.

        The sum over all decisions is the plan's predicted time.
        """
        return self._seconds[decision]

    def extra_seconds(self, decision: int) -> np.ndarray:
        """Return for each option of a decision the seconds that it would add to the step.

        All other decisions stay as they are. The shape is (options,).
        """
        total = np.array(self.decisions.costs[decision], float)
        for other, cost in self._neighbours[decision]:
            total = total + cost[:, self.selected[other]]
        return total - total[self.selected[decision]]


def recover(planned: Planned, model: CostModel, options: ShardingOptions) -> Choices:
    """Identify the options that a plan selects.

    Args:
        planned: a step and its plan, which has a single stage.
        model: the cost model that the plan was made with.
        options: the limits that the plan was made with.

    Raises:
        PlanError: the plan is for another step, leaves all decisions to XLA, or has shardings that
            are no candidates under `options`.
    """
    if options.mode == "manual":
        raise PlanError(
            "nothing inside the step was chosen: the plan pins inputs and outputs, XLA propagates"
            " them. Compile the step to predict it (fidelity='compiled', or autopar report"
            " --compiled), or pin the same shardings with ShardParallel"
        )
    step = planned.step
    replayed = replay(planned)
    (stage,) = planned.plan.stages
    decisions = enumerate_decisions(step, MeshCosts(replayed.mesh, model), options, stage.deferred)
    reads: dict[int | None, list[Use]] = defaultdict(list)
    for use in decisions.uses:
        reads[use.eqn].append(use)
    neighbours: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for (i, j), cost in decisions.edges.items():
        neighbours[i].append((j, cost))
        neighbours[j].append((i, cost.T))
    owner = _owners(decisions, replayed)
    selected = _selected(step, decisions, replayed, owner, reads)
    resharding = _resharding_seconds(step, decisions, selected)
    seconds = []
    for i, k in enumerate(selected):
        compute, communication, inner_resharding = decisions.seconds(i, k)
        seconds.append(Seconds(compute, communication, inner_resharding + float(resharding[i])))
    return Choices(replayed, decisions, owner, selected, reads, tuple(seconds), neighbours)


def _resharding_seconds(
    step: StepGraph, decisions: Decisions, selected: Sequence[int]
) -> np.ndarray:
    """Return for each decision the seconds of resharding the values that it reads, [decisions].

    The cost of an edge belongs to the decision that reads. If two decisions read from one another,
    the bytes that each reads split it.
    """
    resharded: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in decisions.uses:
        i, j = use.value.decision, use.decision
        if i != j and use.value.specs[selected[i]] != use.required[selected[j]]:
            atoms = step.jaxpr.outvars if use.eqn is None else step.jaxpr.eqns[use.eqn].invars
            resharded[min(i, j), max(i, j)][j] += value_bytes(atoms[use.operand])
    seconds = np.zeros(len(selected))
    for (i, j), cost in decisions.edges.items():
        bytes_by_reader = resharded[i, j] or {j: 1}
        total = sum(bytes_by_reader.values())
        for reader, num_bytes in bytes_by_reader.items():
            seconds[reader] += float(cost[selected[i], selected[j]]) * num_bytes / total
    return seconds


def _owners(decisions: Decisions, replayed: Replay) -> dict[int, int]:
    """Return for each decision not about an input the first equation whose result it shards."""
    inputs = {placement.decision for placement in decisions.inputs}
    owner: dict[int, int] = {}
    for equation in replayed.equations:
        for placement in map(decisions.placements.get, equation.eqn.outvars):
            if placement is not None and placement.decision not in inputs:
                owner.setdefault(placement.decision, equation.number)
    return owner


def _selected(
    step: StepGraph,
    decisions: Decisions,
    replayed: Replay,
    owner: dict[int, int],
    reads: dict[int | None, list[Use]],
) -> tuple[int, ...]:
    """Return the option of each decision that has the shardings of the plan.

    It is the first option for constants, which have no other.
    """
    selected = [0] * len(decisions.costs)
    for placement, var, path in zip(
        decisions.inputs, step.jaxpr.invars, step.in_paths, strict=True
    ):
        matches = [spec == replayed.values[var] for spec in placement.specs]
        selected[placement.decision] = _cheapest(path, matches, decisions.costs[placement.decision])
    for decision, number in owner.items():
        equation = replayed.equations[number]
        placements = [decisions.placements[var] for var in equation.eqn.outvars]
        uses = [use for use in reads[number] if use.decision == decision]
        matches = [
            all(use.required[k] == equation.operands[use.operand] for use in uses)
            and all(
                p is None or p.decision != decision or p.specs[k] == spec
                for p, spec in zip(placements, equation.results, strict=True)
            )
            for k in range(len(decisions.costs[decision]))
        ]
        selected[decision] = _cheapest(
            f"equation {number}, {equation.name},", matches, decisions.costs[decision]
        )
    return tuple(selected)


def _cheapest(name: str, matches: Sequence[bool], costs: np.ndarray) -> int:
    """Return the cheapest of the options that match the plan."""
    options = [k for k, match in enumerate(matches) if match]
    if not options:
        raise PlanError(
            f"the plan shards {name} in a way that the planner does not consider under these"
            " options; give the options that it was made with (options=ShardingOptions() allows"
            " the most)"
        )
    return min(options, key=lambda k: costs[k])
