"""Why a plan is as it is: what every input and equation chose, what that costs, and what else it could have chosen."""

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
from autopar.sharding.objective import Placement
from autopar.sharding.options import ShardingOptions
from simulator.costs.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A candidate that was not chosen.

    Attributes:
        choice: the candidate in words.
        extra_seconds: how much longer the step would take if this one choice were another and all others stayed.
    """

    choice: str
    extra_seconds: float

    def __str__(self) -> str:
        return f"{self.choice} ({self.extra_seconds * 1e6:+.4g} us)"


@dataclass(frozen=True, slots=True)
class Reason:
    """What was decided about an input or equation, and why.

    Seconds belong to a decision as a whole, that is to an input or equation together with all that follows it: they add up to
    the plan's predicted time. What follows has none of its own (NaN).

    Attributes:
        eqn: number of the equation in the flat jaxpr; None for an input.
        name: path of the input, or the equation's place in the model and its primitive.
        kind: "input", "decides", "follows", or "free" (made of constants, computed wherever it is needed).
        array: dtype and shape of the (first) result.
        choice: the candidate in words.
        result: the spec of the (first) result.
        follows: what it follows.
        why: why it decides or follows.
        compute_seconds, communication_seconds: its kernels, and completing its partial results.
        resharding_seconds: bringing what it reads where it wants it.
        memory_bytes: bytes of one device's shards of its results.
        runners_up: the candidates that were not chosen, cheapest first.
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
                split = zip(
                    ("compute", "communication", "resharding"),
                    (self.compute_seconds, self.communication_seconds, self.resharding_seconds),
                    strict=True,
                )
                costs = ", ".join(f"{name} {seconds * 1e6:.4g} us" for name, seconds in split)
                result = "" if self.kind == "input" else f" -> {describe_spec(self.result)}"
                others = (
                    f"\n    rather than {'; '.join(map(str, self.runners_up))}"
                    if self.runners_up
                    else ""
                )
                return f"{line}{self.choice}{result}; {costs}; {self.memory_bytes:,} bytes per device{others}"


def explain(
    planned: Planned, model: CostModel, options: ShardingOptions, runners_up: int | None = 3
) -> tuple[Reason, ...]:
    """The reasons for every input and every equation of the flat jaxpr, in its order.

    Args:
        model, options: what the plan was made with.
        runners_up: how many to tell of each decision; None for all.

    Raises:
        PlanError: the plan is for another step, or takes options that the planner would not have under `options`.
    """
    tell = _Teller(planned.step, recover(planned, model, options), runners_up)
    inputs = map(tell.input, range(len(planned.step.jaxpr.invars)))
    return (
        *inputs,
        *(tell.equation(each) for each in tell.choices.replay.equations if each.eqn.outvars),
    )


PRINT_VARIABLE = "AUTOPAR_DEBUG_PRINT_AS_STRATEGY"
"""The environment variable that has every plan printed with its reasons when it is "1"."""


def print_if_asked(step: StepGraph, plan: Plan, costs: CostModel, options: ShardingOptions) -> None:
    """Print the reasons of a plan that was just made, if the user asked for it with the environment variable."""
    if os.environ.get(PRINT_VARIABLE) == "1":
        print(*explain(PlannedStep(step, plan), costs, options), sep="\n")


_NO_SECONDS = Seconds(nan, nan, nan)
_NO_COST = Seconds(0.0, 0.0, 0.0)


class _Teller:
    def __init__(self, step: StepGraph, choices: Choices, runners_up: int | None) -> None:
        self.step, self.choices, self.count = step, choices, runners_up
        self.names = value_names(step)

    def input(self, i: int) -> Reason:
        choices, var = self.choices, self.step.jaxpr.invars[i]
        placement = choices.decisions.inputs[i]
        spec = choices.replay.values[var]
        return Reason(
            None,
            self.step.in_paths[i],
            "input",
            array_text(aval_of(var)),
            describe_spec(spec),
            spec,
            "",
            f"{choices.decisions.roles[i]} input",
            *choices.seconds(placement.decision),
            self._bytes(var, spec),
            self._runners_up(placement.decision, [describe_spec(s) for s in placement.specs]),
        )

    def equation(self, each: ShardedEquation) -> Reason:
        placement = self.choices.decisions.placements[each.eqn.outvars[0]]
        seconds, runners_up, follows = _NO_SECONDS, (), ""
        if placement is None:
            kind, choice, why = "free", "computed wherever it is needed", "made of constants alone"
        elif each.deferred and each.eqn.primitive is accumulate_p:
            kind, why = "decides", "microbatches accumulated apart"
            choice = f"completed along {', '.join(each.deferred)} once, after all microbatches"
            own = [
                self.choices.seconds(d)
                for d, number in self.choices.owner.items()
                if number == each.number
            ]
            seconds = Seconds(*map(sum, zip(_NO_COST, *own, strict=True)))
        elif self.choices.owner.get(placement.decision) == each.number:
            kind, choice = "decides", _choice(each)
            why = "can't keep every sharding that its largest operand may have"
            if each.factors is not None and each.factors.decides:
                why = f"{each.eqn.primitive.name} always decides"
            seconds = self.choices.seconds(placement.decision)
            runners_up = self._candidates(each, placement)
        else:
            kind, choice = "follows", _choice(each)
            follows, why = self._followed(each, placement)
        return Reason(
            each.number,
            each.name,
            kind,
            array_text(aval_of(each.eqn.outvars[0])),
            choice,
            each.results[0],
            follows,
            why,
            *seconds,
            sum(
                self._bytes(var, spec)
                for var, spec in zip(each.eqn.outvars, each.results, strict=True)
            ),
            runners_up,
        )

    def _bytes(self, atom: Atom, spec: Spec) -> int:
        """Of one device's shard."""
        aval = aval_of(atom)
        return array_bytes(local_shape(aval.shape, spec, self.choices.replay.mesh), aval.dtype)

    def _candidates(self, each: ShardedEquation, placement: Placement) -> tuple[RunnerUp, ...]:
        factors = each.factors
        assert factors is not None, "pass-through equations decide nothing"
        required = {use.operand: use.required for use in self.choices.reads[each.number]}
        texts = []
        for k, result in enumerate(placement.specs):
            read = [required[o][k] if o in required else None for o in range(len(each.operands))]
            texts.append(
                describe(factors, assignment_of(factors, read, (result,)), result, each.batch)
            )
        return self._runners_up(placement.decision, texts)

    def _runners_up(self, decision: int, texts: list[str]) -> tuple[RunnerUp, ...]:
        extra = self.choices.extra_seconds(decision)
        order = [int(k) for k in np.argsort(extra, kind="stable") if np.isfinite(extra[k])]
        order.remove(self.choices.taken[decision])
        return tuple(RunnerUp(texts[k], float(extra[k])) for k in order[: self.count])

    def _followed(self, each: ShardedEquation, placement: Placement) -> tuple[str, str]:
        """What an equation follows (its largest operand that the same decision places and that it reads as it is) and why."""
        moved = {use.operand for use in self.choices.reads[each.number]}
        placed = [(k, a) for k, a in enumerate(each.eqn.invars) if each.sources[k] is not None]
        kept = [
            (k, a) for k, a in placed if k not in moved and self._decision(a) == placement.decision
        ]
        if not kept:
            return self.choices.decisions.labels[placement.decision], "placed together with it"
        k, atom = max(kept, key=lambda item: aval_of(item[1]).size)
        if each.factors is None:
            return self._name(atom), "passes it on"
        if len(placed) == 1:
            return self._name(atom), "its only placed operand"
        return self._name(atom), f"operand {k} is its largest, and keeps its sharding"

    def _name(self, atom: Atom) -> str:
        return self.names[atom]  # pyright: ignore[reportArgumentType] (placed atoms are variables)

    def _decision(self, atom: Atom) -> int | None:
        placement = self.choices.decisions.placements[atom]  # pyright: ignore[reportArgumentType] (as above)
        return None if placement is None else placement.decision


def _choice(each: ShardedEquation) -> str:
    if each.factors is None:
        return "as its operand"
    return describe(each.factors, each.assignment, each.results[0], each.batch)
