"""The parts of a step with `accumulate` equations: its body, its marks and its tail.

The body runs for each microbatch, and computes the operands of the marks, which are the
`accumulate` equations. The tail runs once, and reads their results.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jax.extend.core import Jaxpr, Primitive, Var

from autopar.ir.equation_groups import dependents, effects_in, without_effects
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import needed, variables
from autopar.ir.step_graph import Combine, Loop, Microbatching
from autopar.microbatch.gradients import accumulate_p


class StepParts(NamedTuple):
    """The numbered equations of a marked step.

    Attributes:
        body: the equations that run for each microbatch.
        tail: the equations that run once, after the last one.
        marks: the `accumulate` equations.
    """

    body: tuple[Numbered, ...]
    tail: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]


def microbatching_as_marked(
    jaxpr: Jaxpr,
    batch: frozenset[int],
    count: int,
    combine: Iterable[Combine],
    before: Mapping[Var, Combine] = MappingProxyType({}),
) -> Microbatching:
    """Return what of `jaxpr` runs for each microbatch.

    Args:
        jaxpr: the step as it runs, with its `accumulate` equations.
        batch: inputs whose first dim is the batch.
        count: number of microbatches.
        combine: how accumulated values are combined, without the statistics in `before`.
        before: how statistics that a later loop reads are combined.
    """
    body, tail, marks = step_parts(jaxpr, batch)
    loops = _loops(jaxpr, batch, marks, before) if before else [Loop(body, marks)]
    others = iter(combine)
    combined: list[Combine] = [
        before[var] if var in before else next(others) for _, eqn in marks for var in eqn.outvars
    ]
    body = sorted({number: eqn for loop in loops for number, eqn in loop.body}.items())
    return Microbatching(count, tuple(body), tail, marks, tuple(combined), loops=tuple(loops))


def _loops(
    jaxpr: Jaxpr, batch: frozenset[int], marks: Sequence[Numbered], before: Collection[Var]
) -> list[Loop]:
    """Return the loops over the microbatches, in order.

    Args:
        jaxpr: the step as it runs.
        batch: inputs whose first dim is the batch.
        marks: its marks.
        before: the statistics that a later loop reads.
    """
    loop_of: dict[Var, int] = {}
    for eqn in jaxpr.eqns:
        loop = max((loop_of.get(var, 0) for var in variables(eqn.invars)), default=0)
        loop_of.update((var, loop + (var in before)) for var in eqn.outvars)
    early: dict[int, list[Numbered]] = defaultdict(list)
    last: list[Numbered] = []
    for number, eqn in marks:
        if eqn.outvars and eqn.outvars[0] in before:
            early[loop_of[eqn.outvars[0]]].append((number, eqn))
        else:
            last.append((number, eqn))
    groups = [*(early[loop] for loop in sorted(early)), last]
    return [Loop(step_parts(jaxpr, batch, group, before).body, tuple(group)) for group in groups]


def step_parts(
    jaxpr: Jaxpr,
    batch: frozenset[int],
    ends: Sequence[Numbered] | None = None,
    given: Collection[Var] = (),
) -> StepParts:
    """Return the equations that are needed before and after the marks.

    An equation with an effect and no result, such as `jax.debug.print`, runs for each microbatch if
    it depends on the batch but not on marked values, or the loop that has it does. Otherwise it
    runs once, after the marks.

    Args:
        jaxpr: a flat jaxpr with marks, which are its `accumulate` equations.
        batch: inputs whose first dim is the batch.
        ends: the marks that the body computes the operands of; all by default.
        given: values that the body need not compute.
    """
    numbered, marks = list(enumerate(jaxpr.eqns)), named_equations(jaxpr, accumulate_p)
    accumulated = tuple(var for _, eqn in marks for var in eqn.outvars)
    acts = effects_in(jaxpr)
    repeated: set[int] = set()
    if acts:
        depending = dependents(numbered, (jaxpr.invars[i] for i in batch))
        completed = dependents(numbered, accumulated)
        repeated = {
            number
            for number, unit in acts.items()
            if not depending.isdisjoint(unit.reads) and completed.isdisjoint(unit.reads)
        }
    body = without_effects(numbered, acts.keys() - repeated)
    tail = without_effects(numbered, repeated)
    wanted = [atom for _, eqn in (marks if ends is None else ends) for atom in eqn.invars]
    return StepParts(
        tuple(needed(body, wanted, given)),
        tuple(needed(tail, jaxpr.outvars, given=accumulated)),
        tuple(marks),
    )


def mark_of(jaxpr: Jaxpr) -> Numbered:
    """Return the numbered `accumulate` equation of a trace."""
    (mark,) = named_equations(jaxpr, accumulate_p)
    return mark


def named_equations(jaxpr: Jaxpr, primitive: Primitive) -> list[Numbered]:
    """Return the numbered equations of one primitive."""
    return [(number, eqn) for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive is primitive]
