"""The decisions of a step as data: what each option places, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend.core import Var

from autopar.ir.spec import Specs
from autopar.sharding.dataflow import InputRole
from autopar.sharding.mesh_costs import Seconds
from autopar.sharding.selection_problem import SelectionProblem
from simulator.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class Placement:
    """The spec of a value under each option of a decision."""

    decision: int
    specs: Specs


@dataclass(frozen=True, slots=True)
class Use:
    """An operand that an equation, or an output of the step, needs with a spec of its own.

    Attributes:
        eqn: number of the equation; None for an output of the step.
        operand: position of the operand, or of the output.
        value: placement of the value.
        decision: the decision on which the needed spec depends.
        required: the needed spec under each option of `decision`.
        seconds: seconds of resharding for each option of the value's decision and each option of
            `decision`; None if there is nothing to reshard.
    """

    eqn: int | None
    operand: int
    value: Placement
    decision: int
    required: Specs
    seconds: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PartialResult:
    """The result of an equation before a collective completes it.

    Attributes:
        eqn: number of the equation.
        decision: its decision.
        kind: the collective.
        sizes: bytes on one device under each option of the decision; 0 without the collective.
        is_combined: whether XLA combines the collective with others.
    """

    eqn: int
    decision: int
    kind: CollectiveKind
    sizes: np.ndarray
    is_combined: bool


@dataclass
class Decisions:
    """The decisions of a step: the selection problem, and what each choice means.

    Attributes:
        labels: for each decision, the path of its input or the name of its equation.
        costs: for each decision, the seconds of each option.
        parts: the seconds of `costs` of kernels and of completing partial results, shape (2,
            options); the rest is resharding.
        edges: for pairs of decisions, the seconds of resharding for each pair of options.
        placements: placement of each value; None for free values.
        inputs: placement of each input.
        outputs: placement of the outputs that must have a spec.
        decided: number and placements of the results of the equations whose results are
            constrained: those that decide, and those that accumulate microbatches.
        uses: all operands and outputs that need a spec.
        roles: role of each input.
        shares: the terms of `costs` and `edges` by equation. Each has the number of the equation
            and either a decision with seconds of shape (2, options), as in `parts`, or two
            decisions with seconds of resharding. Resharding of the step's outputs has number -1.
        leaders: see `autopar.xla_fusion.Traffic`.
        exponentials: see `autopar.xla_fusion.Traffic`.
        partial: results before a collective completes them.
        workspace: bytes that each matrix product needs while it runs.
        hides_latency: whether XLA runs collectives beside kernels.
    """

    labels: list[str] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    placements: dict[Var, Placement | None] = field(default_factory=dict)
    inputs: list[Placement] = field(default_factory=list)
    outputs: dict[int, Placement] = field(default_factory=dict)
    decided: list[tuple[int, tuple[Placement | None, ...]]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    roles: list[InputRole] = field(default_factory=list)
    shares: list[tuple[int, tuple[int, ...], np.ndarray]] = field(default_factory=list)
    leaders: Mapping[int, int] = field(default_factory=dict)
    exponentials: frozenset[Var] = frozenset()
    partial: list[PartialResult] = field(default_factory=list)
    workspace: int = 0
    hides_latency: bool = False

    def problem(self) -> SelectionProblem:
        """Return the selection problem."""
        return SelectionProblem(self.costs, self.edges)

    def seconds(self, decision: int, option: int) -> Seconds:
        """Return the seconds of an option, without edges."""
        cost = float(self.costs[decision][option])
        compute, communication = map(float, self.parts[decision][:, option])
        rest = cost - compute - communication
        resharding = rest if rest > 1e-9 * cost else 0.0  # less is a rounding error
        return Seconds(compute, communication, resharding)

    def seconds_by_equation(self, choice: Sequence[int], num_equations: int) -> tuple[Seconds, ...]:
        """Return the seconds of each equation, whose sum is the cost of the choice."""
        seconds = [[0.0, 0.0, 0.0] for _ in range(num_equations)]
        for number, decisions, cost in self.shares if num_equations else ():
            if len(decisions) == 2:
                seconds[number][2] += float(cost[choice[decisions[0]], choice[decisions[1]]])
            else:
                compute, communication = cost[:, choice[decisions[0]]]
                seconds[number][0] += float(compute)
                seconds[number][1] += float(communication)
        return tuple(Seconds(*of_equation) for of_equation in seconds)
