"""Statistics of each microbatch in place of those of the batch, as in batch normalization.

A loss that is nonlinear in a statistic of the batch can't be accumulated exactly. With
`batch_statistics="microbatch"` each microbatch uses its own statistics there. The loss and its
gradients, and what else the differentiated function returns, are the means (or sums) of those of
the microbatches. What the step computes from them afterwards, it computes once.

Value and gradient must be of the same function. So the forward and the backward pass treat a
statistic alike: if the backward pass may have a cotangent for it, it is never completed before it
is used. Completed statistics, such as the number of valid labels that divides a loss, depend on the
batch alone.
"""

from collections.abc import Collection, Iterator, Set

from jax.extend.core import Jaxpr, Var

from autopar.ir.equation_groups import Unit, dependents, has_backward, units
from autopar.ir.graph import aval_of, is_differentiated, variables
from autopar.microbatch.batch_statistics import StatisticRules
from autopar.microbatch.body_boundary import before_update


def exact_rules(jaxpr: Jaxpr, batch: Collection[int], stages: bool) -> Iterator[StatisticRules]:
    """Yield rules with which microbatches have the numbers of the whole batch, simplest first.

    Args:
        jaxpr: flat jaxpr of a step.
        batch: inputs whose first dim is the batch, without the positions of the examples.
        stages: whether the step is cut into pipeline stages, which run each microbatch only once.
    """
    yield StatisticRules()
    yield StatisticRules(before_update(jaxpr, batch), totals=not stages)


def own_statistic_rules(
    jaxpr: Jaxpr, larger: Jaxpr, batch: Collection[int], stages: bool
) -> Iterator[StatisticRules]:
    """Yield rules with which microbatches use statistics of their own, the most exact first.

    Args:
        jaxpr: flat jaxpr of a step.
        larger: the step for a larger batch.
        batch: inputs whose first dim is the batch, without the positions of the examples.
        stages: whether the step is cut into pipeline stages.
    """
    repaired = before_update(jaxpr, batch)
    own = _of_differentiated_functions(jaxpr, batch)
    others = (var for i, var in enumerate(jaxpr.invars) if i not in batch)
    of_model = dependents(enumerate(jaxpr.eqns), others)
    if not _differentiates_examples(jaxpr, larger):
        yield StatisticRules(
            repaired, totals=not stages, functions=not stages, own=own, never_completed=of_model
        )
    values = {*jaxpr.constvars, *jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)}
    yield StatisticRules(repaired, functions=False, own=own, never_completed=values)


def _of_differentiated_functions(jaxpr: Jaxpr, batch: Collection[int]) -> Set[int]:
    """Return the numbers of the equations of differentiated functions, and of what they need.

    What follows from a completed gradient, such as a second loss of the updated parameters, does
    not count.
    """
    groups = units(enumerate(jaxpr.eqns))
    backward = (var for unit in groups if has_backward(unit) for var in unit.makes)
    gradients = dependents(enumerate(jaxpr.eqns), backward)
    updated = dependents(
        enumerate(jaxpr.eqns),
        (
            var
            for unit in groups
            if not _is_inside(unit) and not gradients.isdisjoint(unit.reads)
            for var in unit.makes
        ),
    )
    inside: set[int] = set()
    read: set[Var] = set()
    for unit in reversed(groups):
        if updated.isdisjoint(unit.makes) and (_is_inside(unit) or not read.isdisjoint(unit.makes)):
            inside.update(number for number, _ in unit.eqns)
            read.update(unit.reads)
    return inside


def _is_inside(unit: Unit) -> bool:
    return any(is_differentiated(eqn) for _, eqn in unit.eqns)


def _differentiates_examples(jaxpr: Jaxpr, larger: Jaxpr) -> bool:
    """Return whether a backward pass has a result whose shape grows with the batch.

    The step then may differentiate with respect to the batch, and so to statistics of it.
    """
    made = {
        var
        for eqn, other in zip(jaxpr.eqns, larger.eqns, strict=True)
        for var, twin in zip(eqn.outvars, other.outvars, strict=True)
        if aval_of(var).shape != aval_of(twin).shape
    }
    groups = units(enumerate(jaxpr.eqns))
    inner = {var for unit in groups if has_backward(unit) for var in unit.makes} & made
    outer = (var for unit in groups if not has_backward(unit) for var in unit.reads)
    outputs = variables(jaxpr.outvars)
    return not inner.isdisjoint((*outer, *outputs))
