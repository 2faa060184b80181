"""Steps that accumulate the gradients of their microbatches in a loop of their own.

Such a step cuts its batch into chunks. A `scan` or `fori_loop` takes the gradient of one chunk in
each iteration and adds it to its carry, and the update follows. A pipeline takes the chunks as its
microbatches: the equations of one iteration replace the loop, and their sums are accumulated.

What an iteration reads of the batch, such as the slice of a `dynamic_slice` or a key that the loop
splits, is computed for all iterations before the first microbatch (`autopar.tracing.chunk_step`).
Carries that no gradient depends on, such as running averages of batch normalization, are computed
by a loop after the last microbatch, from what the iterations contribute. If the step takes the
gradient of its first chunk before the loop, the loop is rewritten to take that chunk as well
(`autopar.tracing.first_chunk`). Iterations that need anything else of the one before, such as
weights that it has updated, can't overlap and are refused.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.extend.core.primitives import reshape_p, scan_p, squeeze_p

from autopar.ir.control_flow import loop_p
from autopar.ir.equation_groups import dependents, has_backward, units
from autopar.ir.evaluate import Numbered, evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.graph import (
    Atom,
    aval_of,
    is_backward,
    possible_weights,
    renamed,
    rewired,
    scopes,
    source_line,
    variables,
)
from autopar.ir.step_graph import Combine, MicrobatchError
from autopar.microbatch.deferred_division import equations
from autopar.primitives import PrimitiveRecord, record_of, register
from autopar.tracing.chunk_loop import (
    ChunkLoop,
    chunk_loop,
    loop_equations,
    stacked_variable,
    value_of,
)
from autopar.tracing.first_chunk import with_first_chunk
from autopar.tracing.unrolled_chunks import unrolled_chunks

chunk_sum_p = Primitive("chunk_sum")
"""The sum of a value over all chunks; its operand is the value of one chunk."""
register(chunk_sum_p, PrimitiveRecord(movement="identity", algebra="linear"))

chunk_rows_p = Primitive("chunk_rows")
"""An array with a row for each chunk; its operand is the row of one chunk."""
register(chunk_rows_p, PrimitiveRecord())

COMBINE: Mapping[Primitive, Combine] = {chunk_sum_p: "sum", chunk_rows_p: "rows"}
"""How the values of chunks are combined, by the primitive that marks them."""


def has_gradient_in_loop(jaxpr: Jaxpr) -> bool:
    """Return whether a flat step has a loop that takes gradients and is no part of a loss."""
    return any(
        unit.eqns[0][1].primitive is loop_p
        and "jvp(" not in scopes(unit.eqns[0][1])
        and has_backward(unit)
        for unit in units(enumerate(jaxpr.eqns))
    )


def accumulation_loop(jaxpr: Jaxpr, batch: Collection[int]) -> "AccumulationLoop | None":
    """Return the only loop of a step that accumulates gradients; None without exactly one.

    In a step without any, gradients of chunks that it adds one by one are taken for a loop, if the
    chunks are microbatches.

    Args:
        jaxpr: the step, flat but for its loops.
        batch: the numbers of the inputs whose first dim is the batch.

    Raises:
        MicrobatchError: Gradients depend on what the iteration before has computed with weights, or
            the step has layers of the model outside of the loop.
    """
    loops = [chunk_loop(eqn) for eqn in jaxpr.eqns if _accumulates_gradients(eqn)]
    of_model = dependents(enumerate(jaxpr.eqns), possible_weights(jaxpr, batch))
    if not loops:
        unrolled = unrolled_chunks(jaxpr, of_model)
        loop = None if unrolled is None else AccumulationLoop(*unrolled, batch)
        return None if loop is None or loop.error() else loop
    if len(loops) > 1:
        return None
    loop = AccumulationLoop(*with_first_chunk(jaxpr, loops[0], of_model), batch)
    if error := loop.error():
        raise error
    return loop


def _accumulates_gradients(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a scan that adds gradients which it takes to its carry."""
    if eqn.primitive is not scan_p or "jvp(" in scopes(eqn):
        return False
    loop = chunk_loop(eqn)
    eqns = loop.body.eqns
    backward = (var for eqn in eqns if _takes_gradient(eqn) for var in eqn.outvars)
    gradients = dependents(enumerate(eqns), backward)
    sums = zip(loop.handed_on, loop.additive, strict=True)
    return any(adds and after in gradients for after, adds in sums)


def _takes_gradient(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or one of its body, is in a backward pass."""
    return is_backward(eqn) or any(
        any(map(is_backward, flatten(body).eqns)) for body in jaxprs_in_params(eqn.params)
    )


class Carry(NamedTuple):
    """A carry that an iteration needs of the one before.

    Attributes:
        before: the value that an iteration reads.
        init: the first one.
        after: the value that an iteration hands on.
        final: the last one.
    """

    before: Var
    init: Atom
    after: Atom
    final: Var


class AccumulationLoop:
    """An accumulation loop of a step, and the step without it; see `accumulation_loop`.

    Attributes:
        chunks: the loop.
        slices: the array of each value of the body that is a slice of one.
        handed_on: the carries that an iteration needs of the one before.
        eqns: the equations of the step with those of the body in place of the loop. They read
            slices and carries that are handed on, which are to be prepared.
        inside: the numbers of those of the body.
        outvars: the results of the step.
        prepared: the numbers of the equations that are computed before the step.
        of_model: the values that depend on weights.
        of_batch: the values that depend on the batch.
        of_iteration: the values that differ between the iterations, and what depends on them.
    """

    def __init__(self, jaxpr: Jaxpr, loop: ChunkLoop, batch: Collection[int]) -> None:
        self.jaxpr, self.chunks, self.batch = jaxpr, loop, batch
        self.number = number = jaxpr.eqns.index(loop.eqn)
        self.slices = dict(zip(loop.slices, loop.arrays, strict=True))
        names: dict[Var, Atom] = dict(zip(loop.body.invars, loop.consts, strict=False))
        handed_on: list[Carry] = []
        totals: list[JaxprEqn] = []
        ends = zip(loop.init, loop.handed_on, loop.results, strict=False)
        for carry, adds, (init, after, final) in zip(
            loop.carries, loop.additive, ends, strict=True
        ):
            if adds:
                totals += _added(loop, carry, init, final)
            elif after is carry:
                names |= {carry: init, final: init}
            else:
                handed_on.append(Carry(carry, init, after, final))
        rows = zip(loop.results[len(loop.init) :], loop.stacked, strict=True)
        totals += (eqn for final, row in rows for eqn in _stacked(loop, row, final))

        before, inside, totals, after = (
            [rewired(eqn, names) for eqn in eqns]
            for eqns in (jaxpr.eqns[:number], loop.body.eqns, totals, jaxpr.eqns[number + 1 :])
        )
        self.handed_on = [
            carry._replace(after=renamed([carry.after], names)[0]) for carry in handed_on
        ]
        inside, following = self._without_followers(before, inside, totals)
        self.eqns = [*before, *inside, *totals, *following, *after]
        self.inside = range(number, number + len(inside))
        self.outvars = renamed(jaxpr.outvars, names)
        self._classify()

    def _without_followers(
        self, before: list[JaxprEqn], inside: list[JaxprEqn], totals: list[JaxprEqn]
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Compute carries that depend on weights, but that no gradient depends on, after the loop.

        They are no longer handed on.

        Args:
            before: the equations before the loop.
            inside: those of its body.
            totals: those of its sums and stacked values.

        Returns:
            The equations of the body without them, and those that compute them.
        """
        weights = possible_weights(self.jaxpr, self.batch)
        of_model = dependents(enumerate([*before, *inside]), weights)
        ends = [(carry.init, carry.after) for carry in self.handed_on]
        followers = [
            carry
            for carry, atoms in zip(self.handed_on, ends, strict=True)
            if not of_model.isdisjoint(variables(atoms))
        ]
        others = [carry for carry in self.handed_on if carry not in followers]
        made = dependents(enumerate(inside), [carry.before for carry in followers])
        read = [atom for eqn in totals for atom in eqn.invars] + [each.after for each in others]
        moved = [
            eqn for eqn in inside if not made.isdisjoint((*variables(eqn.invars), *eqn.outvars))
        ]
        fixed = any(_is_layer(eqn) or eqn.effects for eqn in moved)
        if not followers or fixed or not made.isdisjoint(variables(read)):
            return inside, []
        self.handed_on = others
        own = {var for eqn in inside for var in eqn.outvars} - made
        own |= {*self.slices, *self.carries}
        atoms = (*(atom for eqn in moved for atom in eqn.invars), *(f.after for f in followers))
        reads = [var for var in dict.fromkeys(variables(atoms)) if var not in made]
        rows = [var for var in reads if var in own]
        constants = [var for var in reads if var not in own]
        stacked = [stacked_variable(var, self.chunks.length) for var in rows]

        def follow(init: list, rows_of_all: list, values: list) -> list:
            env = dict(zip(constants, values, strict=True))

            def body(carry: list, slices: list) -> tuple[list, None]:
                inner = env | dict(zip((f.before for f in followers), carry, strict=True))
                inner |= zip(rows, slices, strict=True)
                evaluate(enumerate(moved), inner, unchanged, unchanged)
                return [value_of(follower.after, inner) for follower in followers], None

            return jax.lax.scan(
                body, init, rows_of_all, self.chunks.length, self.chunks.is_reversed
            )[0]

        results = [follower.final for follower in followers]
        groups = [follower.init for follower in followers], stacked, constants
        pairs = zip(rows, stacked, strict=True)
        following = [eqn for row, final in pairs for eqn in _stacked(self.chunks, row, final)]
        following += loop_equations(follow, groups, results, self.chunks.eqn.source_info)
        return [eqn for eqn in inside if made.isdisjoint(eqn.outvars)], following

    def _classify(self) -> None:
        """Find out which equations are prepared.

        They depend on no weights and not on results of the loop, and they compute or read what is
        computed from the whole batch.
        """
        examples = [self.jaxpr.invars[i] for i in self.batch]
        self.of_model = self._dependents(possible_weights(self.jaxpr, self.batch))
        of_whole = self._dependents(examples)
        in_slices = [var for var, array in self.slices.items() if array in of_whole]
        self.of_batch = of_whole | self._dependents(in_slices)
        self.of_iteration = self._dependents([*self.slices, *self.carries])
        of_whole -= self.of_model | self.of_iteration
        totals = [var for eqn in self.eqns if eqn.primitive in COMBINE for var in eqn.outvars]
        later = self._dependents([*totals, *(carry.final for carry in self.handed_on)])
        self.prepared = {
            n
            for n, eqn in enumerate(self.eqns)
            if not of_whole.isdisjoint((*variables(eqn.invars), *eqn.outvars))
            and self.of_model.union(later).isdisjoint(eqn.outvars)
            and not eqn.effects
        }
        self._prepare_without_first_dim()

    def _prepare_without_first_dim(self) -> None:
        """Prepare chunks like `chunks[i]`: a slice with a single chunk, without its first dim.

        Then the first dim of the inputs are the examples, which may be sharded.
        """
        made = {var for n in self.prepared for var in self.eqns[n].outvars}.union(self.slices)
        for n in self.inside:
            eqn = self.eqns[n]
            if eqn.primitive not in (reshape_p, squeeze_p) or made.isdisjoint(
                variables(eqn.invars)
            ):
                continue
            if aval_of(eqn.invars[0]).shape[:1] == (1,):
                self.prepared.add(n)
                made.update(eqn.outvars)

    @property
    def constants(self) -> dict[Var, Any]:
        """The constants of the step and of the body."""
        return {
            var: value
            for jaxpr in (self.jaxpr, self.chunks.body)
            for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True)
        }

    @property
    def numbered_eqns(self) -> list[Numbered]:
        """The equations with their numbers, without the marks of sums and stacked values."""
        return [each for each in enumerate(self.eqns) if each[1].primitive not in COMBINE]

    @property
    def carries(self) -> list[Var]:
        """The carries that are handed on, as an iteration reads them."""
        return [carry.before for carry in self.handed_on]

    def _dependents(self, sources: Iterable[Var]) -> set[Var]:
        return dependents(enumerate(self.eqns), sources)

    def error(self) -> MicrobatchError | None:
        """Return why the iterations are no microbatches; None if they are."""
        maker = {var: eqn for eqn in self.eqns for var in eqn.outvars}

        def line_of(atom: Atom) -> str:
            return source_line(maker[atom]) if atom in maker else self.chunks.line

        ends = [atom for carry in self.handed_on for atom in (carry.init, carry.after)]
        for atom in variables(ends):
            if atom in self.of_model:
                return MicrobatchError(
                    f"the loop at {self.chunks.line} accumulates gradients that depend on what its"
                    f" iteration before has computed with weights, at {line_of(atom)}: only add to"
                    f" such carries, {_ADVICE}"
                )
        for atom in variables(self.slices.values()):
            if atom in self.of_model:
                return MicrobatchError(
                    f"the loop at {self.chunks.line} accumulates gradients, and what it slices is"
                    f" computed with weights before it, at {line_of(atom)}: compute that in the"
                    f" loop, {_ADVICE}"
                )
        outside = [each for each in self.numbered_eqns if each[0] not in self.inside]
        of_whole = dependents(outside, [self.jaxpr.invars[i] for i in self.batch])
        for n, eqn in outside:
            is_new = n not in self.prepared and not of_whole.isdisjoint(variables(eqn.invars))
            if is_new and _is_layer(eqn):
                return MicrobatchError(
                    f"{eqn.primitive.name} at {source_line(eqn)} needs the whole batch, and the"
                    f" loop at {self.chunks.line} accumulates gradients of its chunks: compute that"
                    f" in the loop, {_ADVICE}"
                )
        return None


_ADVICE = "or take the gradients of the whole batch in one piece, which num_micro_batches divides"


def _is_layer(eqn: JaxprEqn) -> bool:
    """Return whether an equation may be of a layer of the model, or of its gradient."""
    record = record_of(eqn)
    return record.is_costly or is_backward(eqn)


def _added(loop: ChunkLoop, carry: Var, init: Atom, final: Var) -> list[JaxprEqn]:
    """Return the equations that add what all iterations add to a carry to its first value."""
    value, source = loop.addend(carry), loop.eqn.source_info
    total = Var(aval_of(value))
    if isinstance(value, Literal):
        eqns = equations(lambda each: each * loop.length, [value], total, source)
    else:
        eqns = [_marker(loop, chunk_sum_p, value, total)]
    return [*eqns, *equations(jnp.add, [init, total], final, source)]


def _stacked(loop: ChunkLoop, value: Atom, final: Var) -> list[JaxprEqn]:
    """Return the equations that put a value of all iterations together."""
    aval = aval_of(value)
    row = Var(aval_of(final).update(shape=(1, *aval.shape)))
    as_row = partial(jnp.reshape, shape=(1, *aval.shape))
    return [
        *equations(as_row, [value], row, loop.eqn.source_info),
        _marker(loop, chunk_rows_p, row, final),
    ]


def _marker(loop: ChunkLoop, primitive: Primitive, operand: Atom, result: Var) -> JaxprEqn:
    return loop.eqn.replace(
        primitive=primitive, invars=[operand], outvars=[result], params={}, effects=frozenset()
    )
