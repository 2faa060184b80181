"""Products that XLA:GPU delays, and the memory that is live for longer.

XLA's latency-hiding scheduler places kernels from the last to the first. Beside the collective that
completes the gradient of one weight, it runs the product that computes the gradient of another. So
these products run after the rest of the backward pass, and all updates after them.

Without that scheduler, XLA runs first what frees most memory. It counts the result of a product
that is added to a sum over microbatches, although it takes no memory of its own. So such a product
runs after the rest of its microbatch if its operands are smaller than its result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from autopar.ir.graph import variables
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.primitives import record_of
from autopar.sharding.step_decisions import Decisions
from autopar.sharding.value_lifetimes import Lifetime, bases_of_views, local_bytes
from autopar.xla_fusion import readings


class DelayedProduct(NamedTuple):
    """A product that may be delayed until its result is read.

    Attributes:
        eqn: number of its equation.
        decision: its decision.
        is_delayed: whether it is delayed, by the option of the decision.
        at: the program point at which it then runs.
        operands: the values that it reads.
        result: its result.
    """

    eqn: int
    decision: int
    is_delayed: np.ndarray
    at: int
    operands: frozenset[Var]
    result: Var


def delayed_products(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh
) -> list[DelayedProduct]:
    """Return the products that XLA may delay on the devices of a mesh."""
    if decisions.hides_latency:
        return _beside_collectives(step, decisions) if step.microbatching is None else []
    return [] if step.cross_task_values else list(_added_to_sums(step, decisions, mesh))


def _beside_collectives(step: StepGraph, decisions: Decisions) -> list[DelayedProduct]:
    """Return the products whose results collectives complete that XLA combines."""
    bases = bases_of_views(step)
    found = []
    for partial in decisions.partial:
        eqn = step.jaxpr.eqns[partial.eqn]
        first_read, _ = readings(step).get(eqn.outvars[0], (partial.eqn, partial.eqn))
        is_product = record_of(eqn).fusion == "contraction"
        if partial.is_combined and is_product and first_read > partial.eqn + 1:
            operands = {bases.get(atom, atom) for atom in variables(eqn.invars)}
            found.append(
                DelayedProduct(
                    partial.eqn,
                    partial.decision,
                    partial.sizes > 0,
                    first_read - 1,
                    frozenset(operands),
                    eqn.outvars[0],
                )
            )
    return found


def _added_to_sums(
    step: StepGraph, decisions: Decisions, mesh: LogicalMesh
) -> Iterator[DelayedProduct]:
    """Yield the products that are added to sums over microbatches.

    They are delayed where no collective completes them and the operands are smaller.
    """
    bases = bases_of_views(step)
    partial = {each.eqn: each.sizes > 0 for each in decisions.partial}
    required = {(use.eqn, use.operand): use.required for use in decisions.uses}
    added = {
        bases.get(atom, atom): number
        for number, mark in (step.microbatching.marks if step.microbatching else ())
        for atom in variables(mark.invars)
    }
    for number, eqn in enumerate(step.jaxpr.eqns):
        result = eqn.outvars[0] if eqn.outvars else None
        placement = decisions.placements.get(result) if result in added else None
        if result is None or placement is None or record_of(eqn).fusion != "contraction":
            continue
        room = local_bytes(result, placement.specs, mesh)
        for k, atom in enumerate(eqn.invars):
            own = decisions.placements.get(atom) if isinstance(atom, Var) else None
            if own is not None:
                room = room - local_bytes(atom, required.get((number, k), own.specs), mesh)
        yield DelayedProduct(
            number,
            placement.decision,
            (room > 0) & np.logical_not(partial.get(number, False)),
            added[result],
            frozenset(bases.get(atom, atom) for atom in variables(eqn.invars)),
            result,
        )


def with_delays(
    lifetimes: Iterable[Lifetime], products: Sequence[DelayedProduct], choice: Sequence[int]
) -> Iterator[tuple[Lifetime, int, int]]:
    """Yield lifetimes with their first and last program point under a choice.

    A delayed product's operands are live until it runs. Its result is live from then on, and at
    least until the last delayed product runs.
    """
    delayed = [product for product in products if product.is_delayed[choice[product.decision]]]
    starts: Mapping[Var, int] = {product.result: product.at for product in delayed}
    ends = dict.fromkeys(starts, max((product.at for product in delayed), default=0))
    for product in delayed:
        ends.update((var, max(product.at, ends.get(var, 0))) for var in product.operands)
    for life in lifetimes:
        if life.var is None:
            yield life, life.start, life.end
        else:
            start = starts.get(life.var, life.start)
            yield life, start, max(life.end, ends.get(life.var, 0))
