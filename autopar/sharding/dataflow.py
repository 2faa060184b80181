"""Data dependence of a step on its batch: batch dims of values, and the roles of inputs."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import Jaxpr, Literal, Var

from autopar.ir import control_flow
from autopar.ir.graph import Atom, is_backward, variables
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import op_factors, record_of
from autopar.primitives.factors import OpFactors

type InputRole = OneOf["batch", "parameter", "state", "received", "other"]
"""What an input is.

batch: has a row per example. parameter: carried, and the computation per example depends on it.
state: carried, but only the optimizer reads it. received: sent by another stage of a pipeline.
"""


@dataclass(frozen=True)
class Dataflow:
    """Facts about a traced step.

    Attributes:
        factors: the factors of each equation; None for equations that pass values through or have
            no result.
        batch_factors: the factors of each equation that run over the batch.
        batch_dims: the batch dims of the values that have some.
        batch_statistics: values without a batch dim that are computed from the batch, and that
            values with a batch dim depend on; the mean of a batch normalization.
        roles: role of each input.
        readers: number of deciding equations that read each value.
    """

    factors: tuple[OpFactors | None, ...]
    batch_factors: tuple[frozenset[int], ...]
    batch_dims: Mapping[Var, frozenset[int]]
    batch_statistics: frozenset[Var]
    roles: tuple[InputRole, ...]
    readers: Counter[Var]

    @property
    def per_example(self) -> Set[Var]:
        """The values that have a batch dim."""
        return self.batch_dims.keys()

    def is_combined(self, atom: Atom) -> bool:
        """Return whether the compiler combines collectives on a value with others.

        It combines collectives on weights and on their gradients.
        """
        return atom not in self.batch_dims and atom not in self.batch_statistics


@memoized_on_step
def analyze(step: StepGraph) -> Dataflow:
    """Return the data dependence of `step` on its batch.

    Raises:
        MissingRuleError: an equation has no sharding rule.
    """
    eqns = step.jaxpr.eqns
    factors = step_factors(step)
    marked, batch_dims = find_batch_factors(step, factors)
    deciding = [eqn for eqn, op in zip(eqns, factors, strict=True) if op is not None and op.decides]
    readers = Counter(atom for eqn in deciding for atom in eqn.invars if isinstance(atom, Var))
    return Dataflow(
        factors=factors,
        batch_factors=tuple(marked),
        batch_dims=batch_dims,
        batch_statistics=_batch_statistics(step, batch_dims.keys()),
        roles=_roles(step, marked),
        readers=readers,
    )


def step_factors(step: StepGraph) -> tuple[OpFactors | None, ...]:
    """Return the factors of each equation; None if it passes values through or has no result."""
    return _factors(step.jaxpr)


@memoized_on_step
def _factors(jaxpr: Jaxpr) -> tuple[OpFactors | None, ...]:
    passing = [record_of(eqn).passes_through or not eqn.outvars for eqn in jaxpr.eqns]
    return tuple(
        None if passes else op_factors(eqn) for eqn, passes in zip(jaxpr.eqns, passing, strict=True)
    )


def _roles(step: StepGraph, marked: Sequence[frozenset[int]]) -> tuple[InputRole, ...]:
    parameters, carried = _parameters(step, marked), set(step.carried.values())

    def role(i: int, var: Var) -> InputRole:
        if i in step.batch:
            return "batch"
        if i in step.received_inputs:
            return "received"
        if i in carried:
            return "parameter" if var in parameters else "state"
        return "other"

    return tuple(role(i, var) for i, var in enumerate(step.jaxpr.invars))


def find_batch_factors(
    step: StepGraph, factors: Sequence[OpFactors | None]
) -> tuple[list[frozenset[int]], dict[Var, frozenset[int]]]:
    """Return the factors of each equation that run over the batch, and the batch dims of values.

    Batch dims are propagated from the inputs. A loop carry has the batch dims that it has after any
    iteration, which takes a fixed point.
    """
    eqns = step.jaxpr.eqns
    dims_of: dict[Var, frozenset[int]] = {step.jaxpr.invars[i]: frozenset({0}) for i in step.batch}
    dims_of.update((step.jaxpr.invars[i], dims) for i, dims in step.received_inputs.items())
    carried_dims: dict[Var, frozenset[int]] = {}
    while True:
        marked: list[frozenset[int]] = []
        previous = dict(carried_dims)
        for eqn, op in zip(eqns, factors, strict=True):
            marks = [
                frozenset() if isinstance(a, Literal) else dims_of.get(a, frozenset())
                for a in eqn.invars
            ]
            if op is None:
                marked.append(frozenset())
                dims_of.update(zip(eqn.outvars, marks if eqn.outvars else (), strict=True))
                continue
            over_batch = frozenset(
                op.operands[k][d][0]
                for k, dims in enumerate(marks)
                for d in dims
                if op.operands[k][d]
            )
            marked.append(over_batch)
            for var, result in zip(eqn.outvars, op.results, strict=True):
                dims = frozenset(
                    dim for dim, inside in enumerate(result) if inside and inside[0] in over_batch
                )
                dims_of[var] = dims | carried_dims.get(var, frozenset())
            if eqn.primitive is control_flow.loop_result_p:
                carry, result = eqn.invars[0], eqn.outvars[0]
                assert isinstance(carry, Var)
                carried_dims[carry] = dims_of[carry] | dims_of[result]
        if carried_dims == previous:
            return marked, {var: dims for var, dims in dims_of.items() if dims}


def _parameters(step: StepGraph, marked: Sequence[frozenset[int]]) -> set[Var]:
    """Return the inputs that computation per example depends on.

    Other carried inputs are state of the optimizer. A batch of a single example has no batch dim to
    follow; then parameters are what the backward pass depends on.
    """
    per_example = (
        list(map(bool, marked)) if any(marked) else list(map(is_backward, step.jaxpr.eqns))
    )
    reaching: set[Atom] = set()
    while True:
        count = len(reaching)
        for eqn, is_root in zip(reversed(step.jaxpr.eqns), reversed(per_example), strict=True):
            carries = eqn.primitive is control_flow.loop_result_p and eqn.invars[0] in reaching
            if is_root or carries or not reaching.isdisjoint(eqn.outvars):
                reaching.update(variables(eqn.invars))
        if len(reaching) == count:
            return {var for var in step.jaxpr.invars if var in reaching}


def _batch_statistics(step: StepGraph, per_example: Set[Var]) -> frozenset[Var]:
    """Return the values without a batch dim between the batch and values that have one."""
    reached = {step.jaxpr.invars[i] for i in step.batch}
    reaching = set(per_example)
    for eqn in step.jaxpr.eqns:
        if record_of(eqn).passes_through:
            reached.update(
                var
                for atom, var in zip(eqn.invars, eqn.outvars, strict=True)
                if isinstance(atom, Var) and atom in reached
            )
        elif not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    for eqn in reversed(step.jaxpr.eqns):
        if record_of(eqn).passes_through:
            passed = (
                atom for atom, var in zip(eqn.invars, eqn.outvars, strict=True) if var in reaching
            )
            reaching.update(variables(passed))
        elif not reaching.isdisjoint(eqn.outvars):
            reaching.update(variables(eqn.invars))
    return frozenset(reached & reaching) - per_example
