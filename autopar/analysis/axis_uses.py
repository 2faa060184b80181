"""What each mesh axis does with a parameter: read off the equations in which it meets the activations, in the forward pass.

Plans carry the answer (`Value.axes`), so that they can be classified and compared without the step.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal as OneOf

from jax.extend.core import Literal, Var

from autopar.analysis.replay import ShardedEquation, replay
from autopar.ir.graph import Atom, aval_of
from autopar.ir.step_graph import StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.plan import AxisUse, Plan, Split, Stage, Value

type _Completion = OneOf["all_reduce", "reduce_scatter"]


def with_axis_uses(step: StepGraph, plan: Plan) -> Plan:
    """`plan` with the uses of each parameter as its shardings have them.

    Raises:
        PlanError: the plan is for another step.
    """
    (stage,) = plan.stages
    played = replay(PlannedStep(step, plan))
    axes = [axis for axis in stage.axis_names if stage.mesh.sizes[axis] > 1]
    makers = {var: each for each in played.equations for var in each.eqn.outvars}
    updates = {i: step.jaxpr.outvars[o] for o, i in step.carried.items()}
    inputs = list(stage.inputs)
    for i, met in _uses(step, stage, played.equations).items():
        completed = _completions(updates.get(i), inputs[i], makers)
        used = tuple(
            AxisUse(
                axis=axis,
                splits=tuple(sorted({_split(each, k, axis) for each, k in met})),
                completions=tuple(sorted(completed.get(axis, ()))),
            )
            for axis in axes
        )
        inputs[i] = inputs[i].model_copy(update={"axes": used})
    return plan.model_copy(update={"stages": (stage.model_copy(update={"inputs": tuple(inputs)}),)})


def _uses(
    step: StepGraph, stage: Stage, equations: tuple[ShardedEquation, ...]
) -> dict[int, list[tuple[ShardedEquation, int]]]:
    """For each parameter the equations, and operands of them, in which it (or what is made of it alone) meets the batch.

    The backward pass reads kernels transposed, so it is left out where there is a forward one.
    """
    made_of: dict[Var, frozenset[int]] = {
        var: frozenset({i})
        for i, (var, value) in enumerate(zip(step.jaxpr.invars, stage.inputs, strict=True))
        if value.role == "parameter"
    }
    uses: dict[int, list[tuple[ShardedEquation, int]]] = {
        i: [] for sources in made_of.values() for i in sources
    }
    for each in equations:
        sources = [
            frozenset() if isinstance(a, Literal) else made_of.get(a, frozenset())
            for a in each.eqn.invars
        ]
        if each.batch:
            for k, found in enumerate(sources):
                for i in found:
                    uses[i].append((each, k))
        else:
            made_of.update(dict.fromkeys(each.eqn.outvars, frozenset().union(*sources)))
    return {
        i: [use for use in found if not _is_backward(use[0])] or found for i, found in uses.items()
    }


def _is_backward(each: ShardedEquation) -> bool:
    return "transpose(" in str(
        each.eqn.source_info.name_stack
    )  # JAX's mark of a transposed function


def _split(each: ShardedEquation, operand: int, axis: str) -> Split:
    """What `axis` splits in an equation that reads a parameter as its operand number `operand`."""
    factors = each.factors
    assert factors is not None, "pass-through equations have no batch factors"
    split = [f for f, axes in enumerate(each.assignment) if axis in axes]
    if not split:
        return "none"
    (factor,) = split
    if factor in each.batch:
        return "batch"
    dims = [dim for dim, of in enumerate(factors.operands[operand]) if factor in of]
    if not dims:
        return "sequence"
    is_gather = each.eqn.primitive.name == "gather"
    if factors.kinds[factor] != "parallel":
        return "vocab" if is_gather else "row"
    if not factors.decides:  # added or multiplied: the last dim is a feature's
        return "column" if dims[-1] == len(factors.operands[operand]) - 1 else "sequence"
    others = [of for k, of in enumerate(factors.operands) if k != operand]
    shared = all(any(factor in inner for inner in of) for of in others)
    return "expert" if shared and not is_gather else "column"


def _completions(
    update: Atom | None, value: Value, makers: Mapping[Var, ShardedEquation]
) -> dict[str, set[_Completion]]:
    """For each axis the collectives that complete the gradient of a parameter: those that its new value is made with."""
    found: dict[str, set[_Completion]] = {}
    waiting = [update]
    seen: set[Var] = set()
    while waiting:
        atom = waiting.pop()
        if (
            not isinstance(atom, Var)
            or atom in seen
            or atom not in makers
            or aval_of(atom).size != prod(value.shape)
        ):
            continue
        seen.add(atom)
        each = makers[atom]
        if not each.batch:
            waiting.extend(each.eqn.invars)
        for axis, kind in each.synchronised(each.eqn.outvars.index(atom)).items():
            found.setdefault(axis, set()).add(kind)
        for kind, axis in each.completions if each.batch else ():
            found.setdefault(axis, set()).add(kind)
    return found
