"""Products that XLA:GPU delays to run beside collectives, and the memory that is live for longer.

XLA's latency-hiding scheduler places kernels from the last to the first. Beside the collective that
completes the gradient of one weight, it runs the product that computes the gradient of another. So
these products run after the rest of the backward pass, and all updates after them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.step_decisions import Decisions
from autopar.sharding.value_lifetimes import Lifetime, base_of
from autopar.xla_fusion import is_view, readings


class DelayedProduct(NamedTuple):
    """A product that may be delayed until its result is read.

    Attributes:
        decision: its decision.
        is_delayed: whether it is delayed, by the option of the decision.
        at: the program point at which it then runs.
        operands: the values that it reads.
        result: its result.
    """

    decision: int
    is_delayed: np.ndarray
    at: int
    operands: frozenset[Var]
    result: Var


def delayed_products(step: StepGraph, decisions: Decisions) -> list[DelayedProduct]:
    """Return the products whose results collectives complete that XLA combines."""
    if not decisions.hides_latency or step.microbatching is not None:
        return []
    shown_by = {eqn.outvars[0]: eqn.invars[0] for eqn in step.jaxpr.eqns if is_view(eqn)}
    found = []
    for partial in decisions.partial:
        eqn = step.jaxpr.eqns[partial.eqn]
        first_read, _ = readings(step).get(eqn.outvars[0], (partial.eqn, partial.eqn))
        is_product = record_of(eqn).fusion == "contraction"
        if partial.is_combined and is_product and first_read > partial.eqn + 1:
            operands = {base_of(atom, shown_by) for atom in eqn.invars if isinstance(atom, Var)}
            found.append(
                DelayedProduct(
                    partial.decision,
                    partial.sizes > 0,
                    first_read - 1,
                    frozenset(operands),
                    eqn.outvars[0],
                )
            )
    return found


def with_delays(
    lifetimes: Iterable[Lifetime], products: Sequence[DelayedProduct], choice: Sequence[int]
) -> Iterator[tuple[Lifetime, int, int]]:
    """Yield lifetimes with their first and last program point under a choice.

    A delayed product's operands are live until it runs. Its result is live from then on, and at
    least until the last delayed product runs.
    """
    delayed = [product for product in products if product.is_delayed[choice[product.decision]]]
    starts: Mapping[Var, int] = {product.result: product.at for product in delayed}
    ends = {product.result: max(p.at for p in delayed) for product in delayed}
    for product in delayed:
        ends.update((var, max(product.at, ends.get(var, 0))) for var in product.operands)
    for life in lifetimes:
        if life.var is None:
            yield life, life.start, life.end
        else:
            start = starts.get(life.var, life.start)
            yield life, start, max(life.end, ends.get(life.var, 0))
