"""How each mesh axis parallelizes the computation with a parameter.

This follows from the equations of the forward pass that combine the parameter with activations.
Plans store the result (`Value.axes`), so that they can be classified and compared without the step.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal as OneOf

from jax.extend.core import Literal, Var
from jax.extend.core.primitives import gather_p

from autopar.analysis.replay import ShardedEquation, replay
from autopar.ir.graph import Atom, aval_of, is_backward
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.plan import Plan
from autopar.plan_stages import AxisUse, Split, Stage, Value

type _Completion = OneOf["all_reduce", "reduce_scatter"]


def with_axis_uses(step: StepGraph, plan: Plan) -> Plan:
    """Return the plan with the uses of mesh axes by each parameter (`Value.axes`) filled in.

    Args:
        step: the traced step.
        plan: a plan with a single stage.

    Raises:
        PlanError: the plan is for another step.
    """
    (stage,) = plan.stages
    equations = replay(PlannedStep(step, plan)).equations
    axes = stage.mesh.nontrivial_axes
    producers = {var: equation for equation in equations for var in equation.eqn.outvars}
    updates = {i: step.jaxpr.outvars[o] for o, i in step.carried.items()}
    inputs = list(stage.inputs)
    for i, uses in _uses(step, stage, equations).items():
        completions = _completions(updates.get(i), inputs[i], producers)
        axis_uses = tuple(
            AxisUse(
                axis=axis,
                splits=tuple(sorted({_split(equation, k, axis) for equation, k in uses})),
                completions=tuple(sorted(completions.get(axis, ()))),
            )
            for axis in axes
        )
        inputs[i] = inputs[i].model_copy(update={"axes": axis_uses})
    return plan.model_copy(update={"stages": (stage.model_copy(update={"inputs": tuple(inputs)}),)})


def _uses(
    step: StepGraph, stage: Stage, equations: tuple[ShardedEquation, ...]
) -> dict[int, list[tuple[ShardedEquation, int]]]:
    """Return for each parameter the (equation, operand number) pairs where it meets the batch.

    The operand is the parameter or a value computed from parameters alone. The backward pass reads
    kernels transposed, so its equations count only if there are none of the forward pass.
    """
    parameters_of: dict[Var, frozenset[int]] = {
        var: frozenset({i})
        for i, (var, value) in enumerate(zip(step.jaxpr.invars, stage.inputs, strict=True))
        if value.role == "parameter"
    }
    uses: dict[int, list[tuple[ShardedEquation, int]]] = {
        i: [] for parameters in parameters_of.values() for i in parameters
    }
    for equation in equations:
        operands = [
            frozenset() if isinstance(atom, Literal) else parameters_of.get(atom, frozenset())
            for atom in equation.eqn.invars
        ]
        if equation.batch:
            for k, parameters in enumerate(operands):
                for i in parameters:
                    uses[i].append((equation, k))
        else:
            parameters_of.update(dict.fromkeys(equation.eqn.outvars, frozenset().union(*operands)))
    forward_uses = {
        i: [use for use in all_uses if not is_backward(use[0].eqn)] for i, all_uses in uses.items()
    }
    return {i: forward_uses[i] or all_uses for i, all_uses in uses.items()}


def _split(equation: ShardedEquation, operand: int, axis: str) -> Split:
    """Return what a mesh axis splits in an equation that reads a parameter as `operand`."""
    factors = equation.factors
    assert factors is not None, "pass-through equations have no batch factors"
    split_factors = [f for f, axes in enumerate(equation.assignment) if axis in axes]
    if not split_factors:
        return "none"
    (factor,) = split_factors
    if factor in equation.batch:
        return "batch"
    operand_dims = factors.operands[operand]
    dims = [dim for dim, dim_factors in enumerate(operand_dims) if factor in dim_factors]
    if not dims:
        return "sequence"
    is_gather = equation.eqn.primitive is gather_p
    if factors.kinds[factor] != "parallel":
        return "vocab" if is_gather else "row"
    if not factors.decides:  # an addition or multiplication, whose last dim is the features
        return "column" if dims[-1] == len(operand_dims) - 1 else "sequence"
    others = [other for k, other in enumerate(factors.operands) if k != operand]
    shared = all(any(factor in dim_factors for dim_factors in other) for other in others)
    return "expert" if shared and not is_gather else "column"


def _completions(
    update: Atom | None, value: Value, producers: Mapping[Var, ShardedEquation]
) -> dict[str, set[_Completion]]:
    """Return for each mesh axis the collectives that complete the gradient of a parameter.

    They are found by walking back from the updated parameter through values of its size.
    """
    completions: dict[str, set[_Completion]] = {}
    pending = [update]
    visited: set[Var] = set()
    while pending:
        atom = pending.pop()
        if (
            not isinstance(atom, Var)
            or atom in visited
            or atom not in producers
            or aval_of(atom).size != prod(value.shape)
        ):
            continue
        visited.add(atom)
        equation = producers[atom]
        if not equation.batch:
            pending.extend(equation.eqn.invars)
        for axis, kind in equation.synchronized(equation.eqn.outvars.index(atom)).items():
            completions.setdefault(axis, set()).add(kind)
        for kind, axis in equation.completions if equation.batch else ():
            completions.setdefault(axis, set()).add(kind)
    return completions
