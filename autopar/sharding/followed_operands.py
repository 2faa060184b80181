"""Which operand an equation without a decision of its own follows (Alpa, OSDI'22, section 4.2)."""

from collections.abc import Iterator
from math import prod

from jax.extend.core import Var
from jax.extend.core.primitives import broadcast_in_dim_p

from autopar.ir.graph import aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.dataflow import analyze


@memoized_on_step
def followed_operands(step: StepGraph) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the operands of each equation, the best one to follow first.

    That is the one that the rule of the primitive names. Otherwise operands with a batch dim come
    first: a scale per feature may be larger than a small batch of means. Of these the largest is
    followed, then the one with most elements before broadcasting (dims that a broadcast added can
    be sliced to match the others at no cost), then the deepest.

    Raises:
        MissingRuleError: an equation has no sharding rule.
    """
    return tuple(_in_order(step))


def _in_order(step: StepGraph) -> Iterator[tuple[int, ...]]:
    flow = analyze(step)
    depths: dict[Var, int] = {}  # the longest path of equations from an input to each value
    contents: dict[Var, int] = {}  # the number of elements before broadcasting

    def content(atom: Var) -> int:
        return contents[atom] if atom in contents else prod(aval_of(atom).shape)

    for eqn, factors in zip(step.jaxpr.eqns, flow.factors, strict=True):
        ranks = {
            number: (
                factors is not None and factors.leader == number,
                atom in flow.per_example,
                prod(aval_of(atom).shape),
                content(atom),
                depths.get(atom, 0),
            )
            for number, atom in enumerate(eqn.invars)
            if isinstance(atom, Var)
        }
        yield tuple(sorted(ranks, key=ranks.__getitem__, reverse=True))
        depth = 1 + max((depth for *_, depth in ranks.values()), default=0)
        depths.update(dict.fromkeys(eqn.outvars, depth))
        if record_of(eqn).fusion == "elementwise" or eqn.primitive is broadcast_in_dim_p:
            contents[eqn.outvars[0]] = max((count for *_, count, _ in ranks.values()), default=0)
