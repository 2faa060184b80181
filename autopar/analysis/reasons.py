"""Explanation of a plan: for each input and equation its sharding, cost and rejected candidates."""

import os
from dataclasses import dataclass
from math import nan
from typing import Literal as OneOf

import numpy as np

from autopar.analysis.choices import Choices, recover
from autopar.analysis.descriptions import describe, describe_spec
from autopar.analysis.replay import ShardedEquation
from autopar.analysis.reshardings import value_names
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import Spec, local_shape
from autopar.ir.step_graph import StepGraph
from autopar.lowering.placement_specs import array_text
from autopar.lowering.planned import Planned, PlannedStep
from autopar.microbatch.gradients import accumulate_p
from autopar.plan import Plan
from autopar.primitives.factors import assignment_of
from autopar.sharding.mesh_costs import Seconds
from autopar.sharding.options import ShardingOptions
from autopar.sharding.step_decisions import Placement
from simulator.costs.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A candidate that the plan does not select.

    Attributes:
        choice: the candidate in words.
        extra_seconds: seconds that it would add to the step if all other decisions stayed.
    """

    choice: str
    extra_seconds: float

    def __str__(self) -> str:
        return f"{self.choice} ({self.extra_seconds * 1e6:+.4g} us)"


@dataclass(frozen=True, slots=True)
class Reason:
    """The sharding of an input or equation, with its reason and cost.

    Seconds belong to a decision: an input or equation together with all equations that follow its
    sharding. They add up to the plan's predicted time. Equations that follow have NaN seconds.

    Attributes:
        eqn: number of the equation in the flat jaxpr; None for an input.
        name: path of the input, or the equation's scope in the model and its primitive.
        kind: "input", "decides", "follows", or "free" for an equation of constants, which every
            device computes where it reads the result.
        array: dtype and shape of the input or of the first result.
        choice: the selected candidate in words.
        result: the spec of the input or of the first result.
        follows: the value whose sharding the equation follows; empty if it decides.
        why: the reason why it decides or follows.
        compute_seconds: seconds of kernels.
        communication_seconds: seconds of the collectives that complete partial results.
        resharding_seconds: seconds of resharding the operands.
        memory_bytes: bytes of one device's shards of all results.
        runners_up: the candidates that the plan does not select, cheapest first.
    """

    eqn: int | None
    name: str
    kind: OneOf["input", "decides", "follows", "free"]
    array: str
    choice: str
    result: Spec
    follows: str
    why: str
    compute_seconds: float
    communication_seconds: float
    resharding_seconds: float
    memory_bytes: int
    runners_up: tuple[RunnerUp, ...]

    def __str__(self) -> str:
        at = self.name if self.eqn is None else f"#{self.eqn} {self.name}"
        line = f"{at} {self.array}: "
        match self.kind:
            case "follows":
                return f"{line}follows {self.follows} ({self.why})"
            case "free":
                return line + self.choice
            case "input" | "decides":
                seconds = {
                    "compute": self.compute_seconds,
                    "communication": self.communication_seconds,
                    "resharding": self.resharding_seconds,
                }
                costs = ", ".join(f"{name} {s * 1e6:.4g} us" for name, s in seconds.items())
                result = "" if self.kind == "input" else f" -> {describe_spec(self.result)}"
                line += f"{self.choice}{result}; {costs}; {self.memory_bytes:,} bytes per device"
                if self.runners_up:
                    line += f"\n    rather than {'; '.join(map(str, self.runners_up))}"
                return line


def explain(
    planned: Planned, model: CostModel, options: ShardingOptions, runners_up: int | None = 3
) -> tuple[Reason, ...]:
    """Return the reasons for every input, and then for every equation of the flat jaxpr.

    Args:
        planned: a step and its plan, which has a single stage.
        model: the cost model that the plan was made with.
        options: the limits that the plan was made with.
        runners_up: maximum number of other candidates per decision; None for all.

    Raises:
        PlanError: the plan is for another step, leaves all decisions to XLA, or has shardings that
            are no candidates under `options`.
    """
    explainer = _Explainer(planned.step, recover(planned, model, options), runners_up)
    inputs = map(explainer.input, range(len(planned.step.jaxpr.invars)))
    equations = (
        explainer.equation(equation)
        for equation in explainer.choices.replay.equations
        if equation.eqn.outvars
    )
    return (*inputs, *equations)


PRINT_VARIABLE = "AUTOPAR_DEBUG_PRINT_AS_STRATEGY"
"""The environment variable that makes the planner print every plan with its reasons if it is 1."""


def print_if_asked(step: StepGraph, plan: Plan, costs: CostModel, options: ShardingOptions) -> None:
    """Print the reasons of a new plan if the environment variable `PRINT_VARIABLE` is 1."""
    if os.environ.get(PRINT_VARIABLE) == "1":
        print(*explain(PlannedStep(step, plan), costs, options), sep="\n")


_NO_SECONDS = Seconds(nan, nan, nan)
_NO_COST = Seconds(0.0, 0.0, 0.0)


class _Explainer:
    """Explains the decisions of a plan, with at most `runners_up` other candidates for each."""

    def __init__(self, step: StepGraph, choices: Choices, runners_up: int | None) -> None:
        self.step = step
        self.choices = choices
        self.max_runners_up = runners_up
        self.names = value_names(step)

    def input(self, i: int) -> Reason:
        """Return the reason for an input."""
        choices = self.choices
        var = self.step.jaxpr.invars[i]
        placement = choices.decisions.inputs[i]
        spec = choices.replay.values[var]
        compute, communication, resharding = choices.seconds(placement.decision)
        return Reason(
            eqn=None,
            name=self.step.in_paths[i],
            kind="input",
            array=array_text(aval_of(var)),
            choice=describe_spec(spec),
            result=spec,
            follows="",
            why=f"{choices.decisions.roles[i]} input",
            compute_seconds=compute,
            communication_seconds=communication,
            resharding_seconds=resharding,
            memory_bytes=self._shard_bytes(var, spec),
            runners_up=self._runners_up(
                placement.decision, [describe_spec(s) for s in placement.specs]
            ),
        )

    def equation(self, equation: ShardedEquation) -> Reason:
        """Return the reason for an equation that has results."""
        eqn = equation.eqn
        placement = self.choices.decisions.placements[eqn.outvars[0]]
        seconds = _NO_SECONDS
        runners_up = ()
        follows = ""
        if placement is None:
            kind = "free"
            choice = "computed wherever it is needed"
            why = "made of constants alone"
        elif equation.deferred and eqn.primitive is accumulate_p:
            kind = "decides"
            choice = f"completed along {', '.join(equation.deferred)} once, after all microbatches"
            why = "microbatches are accumulated on each device"
            seconds = self._owned_seconds(equation.number)
        elif self.choices.owner.get(placement.decision) == equation.number:
            kind = "decides"
            choice = _choice(equation)
            why = "can't keep every sharding that its largest operand may have"
            if equation.factors is not None and equation.factors.decides:
                why = f"{eqn.primitive.name} always decides"
            seconds = self.choices.seconds(placement.decision)
            runners_up = self._candidates(equation, placement)
        else:
            kind = "follows"
            choice = _choice(equation)
            follows, why = self._followed(equation, placement)
        compute, communication, resharding = seconds
        return Reason(
            eqn=equation.number,
            name=equation.name,
            kind=kind,
            array=array_text(aval_of(eqn.outvars[0])),
            choice=choice,
            result=equation.results[0],
            follows=follows,
            why=why,
            compute_seconds=compute,
            communication_seconds=communication,
            resharding_seconds=resharding,
            memory_bytes=sum(map(self._shard_bytes, eqn.outvars, equation.results)),
            runners_up=runners_up,
        )

    def _owned_seconds(self, number: int) -> Seconds:
        """Return the seconds of all decisions that an equation owns: one for each result."""
        owned = [
            self.choices.seconds(decision)
            for decision, owner in self.choices.owner.items()
            if owner == number
        ]
        return Seconds(*map(sum, zip(_NO_COST, *owned, strict=True)))

    def _shard_bytes(self, atom: Atom, spec: Spec) -> int:
        aval = aval_of(atom)
        return array_bytes(local_shape(aval.shape, spec, self.choices.replay.mesh), aval.dtype)

    def _candidates(self, equation: ShardedEquation, placement: Placement) -> tuple[RunnerUp, ...]:
        factors = equation.factors
        assert factors is not None, "pass-through equations decide nothing"
        required = {use.operand: use.required for use in self.choices.reads[equation.number]}
        texts = []
        for k, result in enumerate(placement.specs):
            read = [
                required[o][k] if o in required else None for o in range(len(equation.operands))
            ]
            assignment = assignment_of(factors, read, (result,))
            texts.append(describe(factors, assignment, result, equation.batch))
        return self._runners_up(placement.decision, texts)

    def _runners_up(self, decision: int, texts: list[str]) -> tuple[RunnerUp, ...]:
        extra = self.choices.extra_seconds(decision)
        order = [int(k) for k in np.argsort(extra, kind="stable") if np.isfinite(extra[k])]
        order.remove(self.choices.selected[decision])
        return tuple(RunnerUp(texts[k], float(extra[k])) for k in order[: self.max_runners_up])

    def _followed(self, equation: ShardedEquation, placement: Placement) -> tuple[str, str]:
        """Return the name of the value that an equation follows, and the reason.

        It is the largest operand of the same decision that the equation reads without resharding.
        """
        resharded = {use.operand for use in self.choices.reads[equation.number]}
        stored = [
            (k, atom)
            for k, atom in enumerate(equation.eqn.invars)
            if equation.sources[k] is not None
        ]
        same_decision = [
            (k, atom)
            for k, atom in stored
            if k not in resharded and self._decision(atom) == placement.decision
        ]
        if not same_decision:
            return self.choices.decisions.labels[placement.decision], "placed together with it"
        k, atom = max(same_decision, key=lambda item: aval_of(item[1]).size)
        if equation.factors is None:
            return self._name(atom), "passes it on"
        if len(stored) == 1:
            return self._name(atom), "its only placed operand"
        return self._name(atom), f"operand {k} is its largest, and keeps its sharding"

    # atoms with a placement are variables

    def _name(self, atom: Atom) -> str:
        return self.names[atom]  # pyright: ignore[reportArgumentType]

    def _decision(self, atom: Atom) -> int | None:
        placement = self.choices.decisions.placements[atom]  # pyright: ignore[reportArgumentType]
        return None if placement is None else placement.decision


def _choice(equation: ShardedEquation) -> str:
    if equation.factors is None:
        return "as its operand"
    return describe(equation.factors, equation.assignment, equation.results[0], equation.batch)
