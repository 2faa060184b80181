"""The first chunk of an accumulation loop, where a step computes it before the loop.

The sum of gradients may start with the gradients of the first chunk, as in big_vision's
`accumulate_gradient`. If the loop does the same with the other chunks, it is rewritten to start
with zeros and to take all chunks. The equations of the first chunk are compared with the equations
of an iteration, from the sums backwards. They may differ in values that depend on no weights, such
as the examples of a chunk or its number. These values become slices of the new loop.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.equation_groups import dependents
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.graph import Atom, aval_of, needed, needed_eqns, variables
from autopar.primitives import record_of
from autopar.tracing.chunk_comparison import ChunkComparison
from autopar.tracing.chunk_loop import (
    ChunkLoop,
    loop_equations,
    stacked_variable,
    value_of,
    zero_equations,
)


def with_first_chunk(jaxpr: Jaxpr, loop: ChunkLoop, of_model: set[Var]) -> tuple[Jaxpr, ChunkLoop]:
    """Return a step and its accumulation loop, with the chunk that the loop starts with in it.

    Args:
        jaxpr: the step, flat but for its loops.
        loop: the loop.
        of_model: the values of the step that depend on weights.

    Returns:
        The step and the loop; as they are if no sum starts with a value that depends on weights, or
        if the loop may compute something else than that value.
    """
    carries = zip(range(len(loop.init)), loop.additive, strict=True)
    sums = [k for k, adds in carries if adds and not of_model.isdisjoint(variables([loop.init[k]]))]
    if not sums:
        return jaxpr, loop
    others = [k for k in range(len(loop.init)) if k not in sums]
    inputs = zip(loop.body.invars, (*loop.consts, *loop.init, *loop.arrays), strict=True)
    weights = [var for var, atom in inputs if isinstance(atom, Var) and atom in of_model]
    of_model = of_model | dependents(enumerate(loop.body.eqns), weights)
    fixed = [*(loop.init[k] for k in others), *(loop.handed_on[k] for k in others), *loop.stacked]
    if not of_model.isdisjoint(variables(fixed)):
        return jaxpr, loop
    consts = dict(zip(loop.body.invars, loop.consts, strict=False))
    comparison = ChunkComparison((loop.body, jaxpr), of_model, consts)
    addends = [loop.addend(loop.carries[k]) for k in sums]
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    starts, firsts = zip(*(_start_of(loop.init[k], makers, of_model) for k in sums), strict=True)
    if not comparison.are_equal(addends, firsts):
        return jaxpr, loop
    return _joined(jaxpr, loop, dict(zip(sums, starts, strict=True)), comparison.differing)


def _start_of(
    init: Atom, makers: Mapping[Var, JaxprEqn], of_model: Collection[Var]
) -> tuple[Atom | None, Atom]:
    """Return what the value of the first chunk is added to, and that value; None for nothing."""
    eqn = makers.get(init) if isinstance(init, Var) else None
    if eqn is not None and record_of(eqn).is_addition:
        weighted = [atom for atom in variables(eqn.invars) if atom in of_model]
        others = [atom for atom in eqn.invars if atom not in weighted]
        if len(weighted) == len(others) == 1:
            return others[0], weighted[0]
    return None, init


def _joined(
    jaxpr: Jaxpr, loop: ChunkLoop, sums: Mapping[int, Atom | None], differing: dict[Var, Atom]
) -> tuple[Jaxpr, ChunkLoop]:
    """Return the step and its loop with the first chunk in the loop.

    Args:
        jaxpr: the step.
        loop: its loop.
        sums: the numbers of the carries that start with sums of the first chunk, and what these
            are added to.
        differing: maps each value of an iteration that differs between the chunks to the value of
            the first chunk.
    """
    others = [k for k in range(len(loop.init)) if k not in sums]
    slices = list(differing)
    length = loop.length + 1
    arrays = [stacked_variable(var, length) for var in slices]
    zeros = {k: Var(aval_of(loop.init[k])) for k, start in sums.items() if start is None}
    starts = [start or zeros[k] for k, start in sums.items()]
    groups = [
        loop.consts,
        [loop.init[k] for k in others],
        loop.arrays,
        [differing[var] for var in slices],
    ]
    results = [*(loop.results[k] for k in others), *loop.results[len(loop.init) :], *arrays]
    source = loop.eqn.source_info
    prepared = [
        *loop_equations(_preparation(loop, others, slices), groups, results, source),
        *zero_equations(list(zeros.values()), source),
    ]
    inputs = [*loop.body.invars[: len(loop.consts)], *(loop.carries[k] for k in sums), *slices]
    outvars = [loop.handed_on[k] for k in sums]
    body = loop.body.replace(
        invars=inputs,
        outvars=outvars,
        eqns=needed_eqns(loop.body.eqns, outvars, inputs),
        debug_info=loop.body.debug_info.with_unknown_names(),
    )
    operands = loop.consts, starts, arrays
    totals = [loop.results[k] for k in sums]
    eqn = loop.eqn.replace(invars=[atom for group in operands for atom in group], outvars=totals)
    number = jaxpr.eqns.index(loop.eqn)
    step = [*jaxpr.eqns[:number], *prepared, eqn, *jaxpr.eqns[number + 1 :]]
    jaxpr = jaxpr.replace(eqns=needed_eqns(step, jaxpr.outvars))
    return jaxpr, ChunkLoop(eqn, body, *operands, totals, length, is_reversed=False)


def _preparation(
    loop: ChunkLoop, others: Sequence[int], slices: Sequence[Var]
) -> Callable[[list, list, list, list], list[jax.Array]]:
    """Return the loop before a loop, which computes what does not depend on weights.

    Args:
        loop: the loop over the chunks after the first one.
        others: the numbers of the carries that do not start with sums of the first chunk.
        slices: the values of an iteration that the new loop reads for all chunks.

    Returns:
        A function of the constants, initial values and arrays of the loop, and of the values of
        `slices` for the first chunk.
    """
    ends = [loop.handed_on[k] for k in others]
    rows = [*loop.stacked, *slices]
    eqns = needed(enumerate(loop.body.eqns), [*ends, *rows])
    constants = dict(zip(loop.body.constvars, loop.body.consts, strict=True))
    names = [loop.carries[k] for k in others]

    def prepare(consts: list, init: list, arrays: list, firsts: list) -> list[jax.Array]:
        env: dict[Var, Any] = constants | dict(zip(loop.body.invars, consts, strict=False))

        def body(carry: list, row: list) -> tuple[list, list]:
            inner = env | dict(zip((*names, *loop.slices), (*carry, *row), strict=True))
            evaluate(eqns, inner, unchanged, unchanged)
            return [value_of(atom, inner) for atom in ends], [
                value_of(atom, inner) for atom in rows
            ]

        last, stacked = jax.lax.scan(body, init, arrays, loop.length, loop.is_reversed)
        own = stacked[len(loop.stacked) :]
        whole = [
            jnp.concatenate([first[None], row]) for first, row in zip(firsts, own, strict=True)
        ]
        return [*last, *stacked[: len(loop.stacked)], *whole]

    return prepare
