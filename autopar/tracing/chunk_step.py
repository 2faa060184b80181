"""A step whose microbatches are the iterations of its accumulation loop.

The equations of one iteration stand in place of the loop (`autopar.tracing.accumulation_loop`).
What differs between the iterations, such as their slices of the batch, are inputs: they are
computed for all iterations before the first microbatch, as other prepared inputs are
(`autopar.ir.preparation`), and cut into microbatches like the batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.array_cuts import CutTree
from autopar.ir.equation_groups import pure
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of, needed, variables
from autopar.ir.keys import impl_of, is_key
from autopar.ir.preparation import Preparation, TracedValue
from autopar.ir.step_graph import Combine, MicrobatchError
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.gradients import accumulate_p
from autopar.microbatch.marked_steps import microbatching_as_marked
from autopar.tracing.accumulation_loop import (
    COMBINE,
    AccumulationLoop,
    accumulation_loop,
)
from autopar.tracing.chunk_loop import value_of
from autopar.tracing.microbatch_traces import SplitStep


class OwnMicrobatchesError(MicrobatchError):
    """A step accumulates the gradients of its own microbatches, and others were asked for.

    Attributes:
        count: the number of its microbatches.
    """

    def __init__(self, name: str, line: str, count: int, asked: int) -> None:
        """Describe the error.

        Args:
            name: the name of the user's function.
            line: the line of its loop or sum, as "FILE:LINE".
            count: the number of its microbatches.
            asked: the number that was asked for.
        """
        self.count = count
        super().__init__(
            f"{name} accumulates the gradients of {count} microbatches itself, at {line}: use"
            f" num_micro_batches={count}, not {asked}"
        )


class ChunkStep(NamedTuple):
    """A step with one iteration of its accumulation loop in place of the loop.

    Attributes:
        jaxpr: the step, flat but for its loops. After the arguments it takes what an iteration
            reads of the batch. `chunk_sum` and `chunk_rows` have the results of all iterations.
        preparation: what computes the further inputs.
        rows: which of the further inputs consist of a part for each iteration.
        length: the number of iterations.
        line: the line of the loop, as "FILE:LINE".
    """

    jaxpr: Jaxpr
    preparation: Preparation
    rows: tuple[bool, ...]
    length: int
    line: str

    def in_microbatches(self, jaxpr: Jaxpr, arguments: CutTree) -> SplitStep:
        """Return the step with its sums accumulated over microbatches.

        Args:
            jaxpr: its jaxpr, flattened and divided into layers.
            arguments: the arguments of that jaxpr, some of which are in pieces.
        """
        first = len(jaxpr.invars) - len(self.rows)
        rows = frozenset(first + k for k, differs in enumerate(self.rows) if differs)
        totals = [eqn for eqn in jaxpr.eqns if eqn.primitive in COMBINE]
        others = [each for each in enumerate(jaxpr.eqns) if each[1].primitive not in COMBINE]
        operands = [atom for eqn in totals for atom in eqn.invars]
        body = {n for n, _ in needed(pure(others), operands)}
        mark = totals[0].replace(
            primitive=accumulate_p,
            invars=operands,
            outvars=[var for eqn in totals for var in eqn.outvars],
            params={},
        )
        before = [eqn for n, eqn in others if n in body]
        after = [eqn for n, eqn in others if n not in body]
        marked = jaxpr.replace(eqns=[*before, mark, *after])
        combine: list[Combine] = [COMBINE[eqn.primitive] for eqn in totals for _ in eqn.invars]
        microbatching = microbatching_as_marked(marked, rows, self.length, combine)
        return SplitStep(marked, microbatching, self._preparation_of_pieces(arguments), rows)

    def _preparation_of_pieces(self, arguments: CutTree) -> Preparation:
        """Return the preparation with an input for each piece of the arguments."""
        jaxpr = self.preparation.jaxpr
        inputs: list[Var] = []
        for i, var in enumerate(jaxpr.invars):
            count = len(arguments.numbers_of_pieces([i]))
            inputs += [var] if count == 1 else [Var(var.aval) for _ in range(count)]
        reads = sorted(arguments.numbers_of_pieces(self.preparation.reads))
        return replace(self.preparation, jaxpr=jaxpr.replace(invars=inputs), reads=tuple(reads))


def chunk_step(jaxpr: Jaxpr, batch: Collection[int]) -> ChunkStep | None:
    """Return a step with one iteration of its accumulation loop in place of the loop.

    Args:
        jaxpr: the step, flat but for its loops.
        batch: the numbers of the inputs whose first dim is the batch.

    Returns:
        The step; None if it does not accumulate gradients in exactly one loop, or has nothing that
        differs between the iterations.

    Raises:
        MicrobatchError: The iterations are no microbatches (`accumulation_loop`).
    """
    loop = accumulation_loop(jaxpr, batch)
    if loop is None:
        return None
    rest = [each for each in enumerate(loop.eqns) if each[0] not in loop.prepared]
    eqns = [eqn for _, eqn in needed(rest, loop.outvars)]
    inputs = _ChunkInputs(loop, eqns)
    constants = loop.constants
    step = jaxpr.replace(
        constvars=list(constants),
        consts=list(constants.values()),
        invars=[*_of_one_chunk(loop), *inputs.variables],
        eqns=[*inputs.eqns, *eqns],
        outvars=loop.outvars,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    rows = tuple(map(inputs.is_row, inputs.values))
    if not any(rows):
        return None
    return ChunkStep(step, inputs.preparation(), rows, loop.chunks.length, loop.chunks.line)


def _of_one_chunk(loop: AccumulationLoop) -> list[Var]:
    """Return the arguments of a step with the batch of one chunk."""
    arguments: list[Var] = []
    for i, var in enumerate(loop.jaxpr.invars):
        if i in loop.batch:
            rows, *others = aval_of(var).shape
            var = Var(aval_of(var).update(shape=(rows // loop.chunks.length, *others)))
        arguments.append(var)
    return arguments


class _ChunkInputs:
    """The values that a step without its loop reads and does not compute.

    Attributes:
        values: the values.
        variables: the inputs that they are computed from.
        eqns: the equations that compute them.
    """

    def __init__(self, loop: AccumulationLoop, eqns: Sequence[JaxprEqn]) -> None:
        """Find the values.

        Args:
            loop: the loop.
            eqns: the equations of the step without it.
        """
        self.loop = loop
        known = {var for i, var in enumerate(loop.jaxpr.invars) if i not in loop.batch}
        known |= loop.constants.keys()
        known.update(var for eqn in eqns for var in eqn.outvars)
        atoms = (*(atom for eqn in eqns for atom in eqn.invars), *loop.outvars)
        self.values = [var for var in dict.fromkeys(variables(atoms)) if var not in known]
        parts = (aval_of(var).shape[0] for var in self.values if self._is_part(var))
        self._num_examples = min(parts, default=1)
        self.variables: list[Var] = []
        self.eqns: list[JaxprEqn] = []
        for var in self.values:
            if not self.is_row(var) or self._is_part(var):
                self.variables.append(var)
                continue
            aval = aval_of(var)
            row = jax.eval_shape(_as_numbers, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            self.variables.append(Var(ShapedArray((self._num_examples, *row.shape), row.dtype)))
            back = partial(_from_rows, impl_of(aval.dtype) if is_key(aval.dtype) else None)
            self.eqns += equations(back, self.variables[-1:], var, loop.chunks.eqn.source_info)

    def is_row(self, var: Var) -> bool:
        """Return whether each iteration has a value of its own."""
        return var in self.loop.of_iteration

    def _is_part(self, var: Var) -> bool:
        """Return whether each iteration has its own examples along the first dim of a value."""
        return self.is_row(var) and var in self.loop.of_batch and aval_of(var).ndim > 0

    def preparation(self) -> Preparation:
        """Return what computes the inputs before the step."""
        loop, values = self.loop, self.values
        eqns = pure(loop.numbered_eqns)
        rows = [var for var in values if self.is_row(var) and var not in loop.slices]
        afters = [carry.after for carry in loop.handed_on]
        iteration = [
            (n, eqn)
            for n, eqn in needed(eqns, [*rows, *afters], [*loop.slices, *loop.carries])
            if not loop.of_iteration.isdisjoint(eqn.outvars)
        ]
        operands = {var for _, eqn in iteration for var in variables(eqn.invars)}
        inits = [carry.init for carry in loop.handed_on]
        finals = [carry.final for carry in loop.handed_on]
        fixed = [var for var in values if not self.is_row(var) and var not in finals]
        wanted = [*(operands - loop.of_iteration), *fixed, *inits, *loop.slices.values()]
        once = needed(eqns, wanted)

        def compute(*arguments: jax.Array) -> list[jax.Array]:
            env: dict[Var, Any] = loop.constants | dict(
                zip(loop.jaxpr.invars, arguments, strict=True)
            )
            evaluate(once, env, unchanged, unchanged)

            def body(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list, list]:
                inner = env | dict(zip(loop.carries, carry, strict=True))
                inner |= zip(loop.slices, slices, strict=True)
                evaluate(iteration, inner, unchanged, unchanged)
                return [value_of(atom, inner) for atom in afters], [inner[var] for var in rows]

            first = [value_of(atom, env) for atom in inits]
            arrays = [value_of(atom, env) for atom in loop.slices.values()]
            last, stacked = jax.lax.scan(
                body, first, arrays, loop.chunks.length, loop.chunks.is_reversed
            )
            env.update(zip((*finals, *loop.slices, *rows), (*last, *arrays, *stacked), strict=True))
            return [self._as_input(var, env[var]) for var in values]

        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, loop.jaxpr.invars)]
        traced = flatten(jax.make_jaxpr(compute)(*avals))
        atoms = (*(atom for eqn in traced.eqns for atom in eqn.invars), *traced.outvars)
        read = set(variables(atoms))
        return Preparation(
            traced,
            tuple(TracedValue(loop.number, k) for k in range(len(values))),
            (loop.chunks.line,),
            tuple(i for i, var in enumerate(traced.invars) if var in read),
        )

    def _as_input(self, var: Var, value: jax.Array) -> jax.Array:
        """Return an input of the microbatches, from the values of all iterations.

        Values that are not of examples, such as random keys, are there for each example, so that
        they are cut like the batch.
        """
        if not self.is_row(var):
            return value
        if self._is_part(var):
            return value.reshape(-1, *value.shape[2:])
        return jnp.repeat(_as_numbers(value), self._num_examples, axis=0)


def _as_numbers(value: jax.Array) -> jax.Array:
    """Return the numbers of random keys; other values as they are."""
    return jax.random.key_data(value) if is_key(value.dtype) else value


def _from_rows(impl: str | None, rows: jax.Array) -> jax.Array:
    """Return the value of an iteration, from rows that are all equal.

    Args:
        impl: the implementation if the value is of random keys.
        rows: the rows.
    """
    row = jax.lax.index_in_dim(rows, 0, keepdims=False)
    return row if impl is None else jax.random.wrap_key_data(row, impl=impl)
