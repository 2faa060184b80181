"""Constraints that impose a choice of shardings on XLA's partitioner."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import Var

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import Spec, replicated
from autopar.ir.step_graph import StepGraph
from autopar.primitives import runs_on_shards
from autopar.sharding.loop_sums import summed_iterations
from autopar.sharding.reshard_hoisting import passes_moves
from autopar.sharding.step_decisions import Decisions, Placement


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


def imposed_constraints(
    step: StepGraph, decisions: Decisions, choice: Sequence[int]
) -> tuple[Constraint, ...]:
    """Return the constraints that impose a choice, in the order of equations.

    Args:
        step: the step.
        decisions: its decisions.
        choice: the option of each decision.
    """
    builder = _ConstraintBuilder(step, decisions, choice)
    builder.constrain_decided()
    builder.constrain_uses()
    builder.hoist()
    builder.constrain_shardwise()
    builder.constrain_cross_task_values()
    builder.constrain_sums()
    constraints = {*builder.results.values(), *builder.operands}
    return tuple(sorted(constraints, key=lambda c: (c.eqn, c.side, c.index)))


def chosen_spec(placement: Placement | None, choice: Sequence[int], ndim: int) -> Spec:
    """Return the spec of a placement under a choice; values without a placement are replicated."""
    return placement.specs[choice[placement.decision]] if placement else replicated(ndim)


class _ConstraintBuilder:
    """Collects constraints.

    Attributes:
        results: the constraint of each result that has one.
        operands: the constraints of operands.
    """

    def __init__(self, step: StepGraph, decisions: Decisions, choice: Sequence[int]) -> None:
        self.step, self.decisions, self.choice = step, decisions, choice
        self.results: dict[Var, Constraint] = {}
        self.operands: list[Constraint] = []
        self._makers = {
            var: (number, r)
            for number, eqn in enumerate(step.jaxpr.eqns)
            for r, var in enumerate(eqn.outvars)
        }

    def constrain_decided(self) -> None:
        """Constrain the results of equations that decide."""
        for number, placements in self.decisions.decided:
            for var, placement in zip(
                self.step.jaxpr.eqns[number].outvars, placements, strict=True
            ):
                if placement is not None:
                    self._constrain_result(var, chosen_spec(placement, self.choice, 0))

    def constrain_uses(self) -> None:
        """Constrain operands that are resharded, and the values that deciding equations read.

        A value without a decision of its own is constrained where an equation or an output of the
        step reshards it, or an equation decides by it. Otherwise the partitioner may compute it
        resharded, and reshard its operands, or itself for the other readers.
        """
        eqns = self.step.jaxpr.eqns
        deciding = {number for number, _ in self.decisions.decided}
        for use in self.decisions.uses:
            present = chosen_spec(use.value, self.choice, 0)
            required = use.required[self.choice[use.decision]]
            if present == required and use.eqn not in deciding:
                continue
            if present != required and use.eqn is not None:
                self.operands.append(Constraint(use.eqn, "in", use.operand, required))
            atoms = self.step.jaxpr.outvars if use.eqn is None else eqns[use.eqn].invars
            var = atoms[use.operand]
            if isinstance(var, Var) and var in self._makers and var not in self.results:
                self._constrain_result(var, present)

    def hoist(self) -> None:
        """Reshard the operand of an equation instead, if all readers reshard its result alike."""
        eqns = self.step.jaxpr.eqns
        readers = Counter(atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var))
        constraints_of: dict[Atom, list[Constraint]] = defaultdict(list)
        for constraint in self.operands:
            constraints_of[eqns[constraint.eqn].invars[constraint.index]].append(constraint)
        for number, eqn in enumerate(eqns):
            if not passes_moves(eqn) or eqn.outvars[0] in self.step.jaxpr.outvars:
                continue
            result = eqn.outvars[0]
            of_result = constraints_of.get(result, [])
            specs = {constraint.spec for constraint in of_result}
            if len(of_result) == readers[result] and len(specs) == 1:
                (spec,) = specs
                constraints_of[result] = [Constraint(number, "in", 0, spec)]
                self.results[result] = Constraint(number, "out", 0, spec)
        self.operands = [constraint for group in constraints_of.values() for constraint in group]

    def constrain_shardwise(self) -> None:
        """Constrain all operands of equations that run on shards (`runs_on_shards`)."""
        for use in self.decisions.uses:
            if use.eqn is not None and runs_on_shards(self.step.jaxpr.eqns[use.eqn]):
                required = use.required[self.choice[use.decision]]
                self.operands.append(Constraint(use.eqn, "in", use.operand, required))

    def constrain_cross_task_values(self) -> None:
        """Constrain the values that one task of a stage computes and another one reads."""
        for var in self.step.cross_task_values:
            if var not in self.results:
                placement = self.decisions.placements[var]
                self._constrain_result(var, chosen_spec(placement, self.choice, aval_of(var).ndim))

    def constrain_sums(self) -> None:
        """Constrain sums over the iterations of a loop, inside the loop and after it.

        Otherwise the partitioner may shard a sum as its reader after the loop does, and complete a
        part of it in each iteration.
        """
        eqns = self.step.jaxpr.eqns
        sums = summed_iterations(eqns, self.step.jaxpr.outvars)
        for eqn in eqns:
            is_final = eqn.primitive is control_flow.loop_result_p
            carried = [atom for atom in eqn.invars[:2] if is_final and isinstance(atom, Var)]
            makers = [eqns[self._makers[var][0]] for var in carried if var in self._makers]
            addends = {atom for maker in makers for atom in maker.invars if isinstance(atom, Var)}
            for var in () if addends.isdisjoint(sums) else (*carried, *eqn.outvars):
                placement = self.decisions.placements.get(var)
                if placement is not None and var not in self.results:
                    self._constrain_result(var, chosen_spec(placement, self.choice, 0))

    def _constrain_result(self, var: Var, spec: Spec) -> None:
        number, index = self._makers[var]
        self.results[var] = Constraint(number, "out", index, spec)
