"""Steps that accumulate the gradients of their microbatches in a loop of their own.

Such a step cuts its batch into chunks. A `scan` or `fori_loop` takes the gradient of one chunk in
each iteration and adds it to its carry, and the update follows. A pipeline takes the chunks as its
microbatches: the equations of one iteration replace the loop, and their sums are accumulated.

What an iteration reads of the batch, such as the slice of a `dynamic_slice` or a key that the loop
splits, is computed for all iterations before the first microbatch, as other prepared inputs are
(`autopar.ir.preparation`). Iterations that need anything else of the one before, such as running
statistics of a model or weights that it has updated, can't overlap and are refused.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.extend.core.primitives import convert_element_type_p, scan_p

from autopar.ir.array_cuts import CutTree
from autopar.ir.control_flow import loop_p
from autopar.ir.equation_groups import dependents, has_backward, units
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of, is_backward, needed, read, scopes, source_line
from autopar.ir.keys import impl_of, is_key
from autopar.ir.preparation import Preparation, TracedValue
from autopar.ir.step_graph import Combine, MicrobatchError
from autopar.layering.gradient_scans import additive_carries
from autopar.layering.stack_cutting import scan_operands
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.gradients import accumulate_p
from autopar.microbatch.splitting import microbatching_as_marked
from autopar.primitives import PrimitiveRecord, record_of, register
from autopar.tracing.microbatch_traces import SplitStep

chunk_sum_p = Primitive("chunk_sum")
"""The sum over all chunks of its operand, which is that of one chunk."""
register(chunk_sum_p, PrimitiveRecord(movement="identity", algebra="linear"))

chunk_rows_p = Primitive("chunk_rows")
"""The rows of all chunks; its operand is the row of one chunk."""
register(chunk_rows_p, PrimitiveRecord())

_COMBINE: Mapping[Primitive, Combine] = {chunk_sum_p: "sum", chunk_rows_p: "rows"}


class OwnMicrobatchesError(MicrobatchError):
    """A step accumulates the gradients of its own microbatches, and others were asked for.

    Attributes:
        count: The number of its microbatches.
    """

    def __init__(self, name: str, line: str, count: int, asked: int) -> None:
        """Describe the error.

        Args:
            name: The name of the user's function.
            line: The line of its loop, as "FILE:LINE".
            count: The number of its microbatches.
            asked: The number that was asked for.
        """
        self.count = count
        super().__init__(
            f"{name} accumulates the gradients of {count} microbatches itself, in the loop at"
            f" {line}: use num_micro_batches={count}, not {asked}"
        )


class ChunkStep(NamedTuple):
    """A step with one iteration of its accumulation loop in place of the loop.

    Attributes:
        jaxpr: The step, flat but for its loops. After the arguments it takes what an iteration
            reads of the batch. `chunk_sum` and `chunk_rows` have the results of all iterations.
        preparation: What computes the further inputs.
        rows: Which of the further inputs consist of a part for each iteration.
        length: The number of iterations.
        line: The line of the loop, as "FILE:LINE".
    """

    jaxpr: Jaxpr
    preparation: Preparation
    rows: tuple[bool, ...]
    length: int
    line: str

    def in_microbatches(self, jaxpr: Jaxpr, arguments: CutTree) -> SplitStep:
        """Return the step with its sums accumulated over microbatches.

        Args:
            jaxpr: Its jaxpr, flattened and divided into layers.
            arguments: The arguments of that jaxpr, some of which are in pieces.
        """
        first = len(jaxpr.invars) - len(self.rows)
        rows = frozenset(first + k for k, differs in enumerate(self.rows) if differs)
        totals = [eqn for eqn in jaxpr.eqns if eqn.primitive in _COMBINE]
        others = [each for each in enumerate(jaxpr.eqns) if each[1].primitive not in _COMBINE]
        operands = [atom for eqn in totals for atom in eqn.invars]
        pure = [(n, eqn) for n, eqn in others if not eqn.effects]
        body = {n for n, _ in needed(pure, operands)}
        mark = totals[0].replace(
            primitive=accumulate_p,
            invars=operands,
            outvars=[var for eqn in totals for var in eqn.outvars],
            params={},
        )
        before = [eqn for n, eqn in others if n in body]
        after = [eqn for n, eqn in others if n not in body]
        marked = jaxpr.replace(eqns=[*before, mark, *after])
        combine: list[Combine] = [_COMBINE[eqn.primitive] for eqn in totals for _ in eqn.invars]
        microbatching = microbatching_as_marked(marked, rows, self.length, combine)
        return SplitStep(marked, microbatching, self._preparation_of_pieces(arguments), rows)

    def _preparation_of_pieces(self, arguments: CutTree) -> Preparation:
        """Return the preparation with an input for each piece of the arguments."""
        jaxpr = self.preparation.jaxpr
        inputs = [
            var if len(pieces) == 1 else Var(var.aval)
            for i, var in enumerate(jaxpr.invars)
            for pieces in [arguments.numbers_of_pieces([i])]
            for _ in pieces
        ]
        reads = sorted(arguments.numbers_of_pieces(self.preparation.reads))
        return replace(self.preparation, jaxpr=jaxpr.replace(invars=inputs), reads=tuple(reads))


def has_gradient_in_loop(jaxpr: Jaxpr) -> bool:
    """Return whether a flat step has a loop that takes gradients and is no part of a loss."""
    return any(
        unit.eqns[0][1].primitive is loop_p
        and "jvp(" not in scopes(unit.eqns[0][1])
        and has_backward(unit)
        for unit in units(enumerate(jaxpr.eqns))
    )


def chunk_step(jaxpr: Jaxpr, batch: Collection[int]) -> ChunkStep | None:
    """Return a step with one iteration of its accumulation loop in place of the loop.

    Args:
        jaxpr: The step, flat but for its loops.
        batch: The numbers of the inputs whose first dim is the batch.

    Returns:
        The step; None if it does not accumulate gradients in exactly one loop, or has nothing that
        differs between the iterations.

    Raises:
        MicrobatchError: An iteration needs more of the one before than sums, or the step has layers
            of the model outside of the loop.
    """
    numbers = [n for n, eqn in enumerate(jaxpr.eqns) if _accumulates_gradients(eqn)]
    if len(numbers) != 1:
        return None
    loop = _AccumulationLoop(jaxpr, numbers[0], batch)
    loop.check()
    step = loop.chunk_step()
    return step if any(step.rows) else None


def _accumulates_gradients(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a scan that adds gradients which it takes to its carry."""
    if eqn.primitive is not scan_p or "jvp(" in scopes(eqn):
        return False
    body = _flat_body(eqn)
    consts, init, _ = scan_operands(eqn)
    backward = (var for eqn in body.eqns if _takes_gradient(eqn) for var in eqn.outvars)
    gradients = dependents(enumerate(body.eqns), backward)
    additive = additive_carries(body, len(consts), len(init))
    return any(adds and body.outvars[k] in gradients for k, adds in enumerate(additive))


def _flat_body(scan: JaxprEqn) -> Jaxpr:
    """Return the body of a scan, flat but for its loops, without casts of a dtype to itself.

    A carry that starts as a Python number is cast to itself to lose its weak type.
    """
    body = flatten(scan.params["jaxpr"], loops=False)
    names: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def named(atoms: Iterable[Atom]) -> list[Atom]:
        return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    for eqn in body.eqns:
        eqn = eqn.replace(invars=named(eqn.invars))
        is_cast = eqn.primitive is convert_element_type_p
        if is_cast and aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype:
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            eqns.append(eqn)
    return body.replace(eqns=eqns, outvars=named(body.outvars))


def _takes_gradient(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or one of its body, is in a backward pass."""
    return is_backward(eqn) or any(
        any(map(is_backward, flatten(body).eqns)) for body in jaxprs_in_params(eqn.params)
    )


class _Carry(NamedTuple):
    """A carry that an iteration needs of the one before.

    Attributes:
        before: The value that an iteration reads.
        init: The first one.
        after: The value that an iteration hands on.
        final: The last one.
    """

    before: Var
    init: Atom
    after: Atom
    final: Var


class _AccumulationLoop:
    """An accumulation loop of a step, and the step without it; see `chunk_step`.

    Attributes:
        scan: The loop.
        body: Its flat body.
        slices: The array of each value of the body that is a slice of one.
        handed_on: The carries that an iteration needs of the one before.
        eqns: The equations of the step with those of the body in place of the loop. They read
            slices and carries that are handed on, which are to be prepared.
        inside: The numbers of those of the body.
        outvars: The results of the step.
    """

    def __init__(self, jaxpr: Jaxpr, number: int, batch: Collection[int]) -> None:
        self.jaxpr, self.number, self.batch = jaxpr, number, batch
        self.scan = scan = jaxpr.eqns[number]
        self.length: int = scan.params["length"]
        self.line = source_line(scan)
        self.body = body = _flat_body(scan)
        consts, init, arrays = scan_operands(scan)
        first = len(consts)
        carries = body.invars[first : first + len(init)]
        self.slices = dict(zip(body.invars[first + len(init) :], arrays, strict=True))
        additive = additive_carries(body, first, len(init))
        names: dict[Var, Atom] = dict(zip(body.invars, consts, strict=False))
        handed_on: list[_Carry] = []
        totals: list[JaxprEqn] = []
        for k, carry in enumerate(carries):
            after, final = body.outvars[k], scan.outvars[k]
            if additive[k]:
                totals += _added(scan, body, carry, init[k], final)
            elif after is carry:
                names |= {carry: init[k], final: init[k]}
            else:
                handed_on.append(_Carry(carry, init[k], after, final))
        rows = zip(scan.outvars[len(init) :], body.outvars[len(init) :], strict=True)
        totals += (eqn for final, row in rows for eqn in _stacked(scan, row, final))

        def named(atoms: Iterable[Atom]) -> list[Atom]:
            return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

        eqns = [*jaxpr.eqns[:number], *body.eqns, *totals, *jaxpr.eqns[number + 1 :]]
        self.eqns = [eqn.replace(invars=named(eqn.invars)) for eqn in eqns]
        self.inside = range(number, number + len(body.eqns))
        self.outvars = named(jaxpr.outvars)
        self.handed_on = [carry._replace(after=named([carry.after])[0]) for carry in handed_on]
        self._classify()

    def _classify(self) -> None:
        """Find out which equations are prepared.

        They depend on no weights and not on results of the loop, and they compute or read what is
        computed from the whole batch.
        """
        examples = [self.jaxpr.invars[i] for i in self.batch]
        weights = [
            var
            for var in self.jaxpr.invars
            if var not in examples
            and aval_of(var).ndim
            and jnp.issubdtype(aval_of(var).dtype, jnp.inexact)
        ]
        self.of_model = self._dependents(weights)
        of_whole = self._dependents(examples)
        in_slices = [var for var, array in self.slices.items() if array in of_whole]
        self.of_batch = of_whole | self._dependents(in_slices)
        self.of_iteration = self._dependents([*self.slices, *self._carries])
        of_whole -= self.of_model | self.of_iteration
        totals = [var for eqn in self.eqns if eqn.primitive in _COMBINE for var in eqn.outvars]
        later = self._dependents([*totals, *(carry.final for carry in self.handed_on)])
        self.prepared = {
            n
            for n, eqn in enumerate(self.eqns)
            if not of_whole.isdisjoint((*_variables(eqn), *eqn.outvars))
            and self.of_model.union(later).isdisjoint(eqn.outvars)
            and not eqn.effects
        }

    @property
    def _carries(self) -> list[Var]:
        """The carries that are handed on, as an iteration reads them."""
        return [carry.before for carry in self.handed_on]

    def _dependents(self, sources: Iterable[Var]) -> set[Var]:
        return dependents(enumerate(self.eqns), sources)

    def check(self) -> None:
        """Raise MicrobatchError if the iterations are no microbatches."""
        maker = {var: eqn for eqn in self.eqns for var in eqn.outvars}

        def line_of(atom: Atom) -> str:
            return source_line(maker[atom]) if atom in maker else self.line

        ends = [atom for carry in self.handed_on for atom in (carry.init, carry.after)]
        for atom in _only_variables(ends):
            if atom in self.of_model:
                raise MicrobatchError(
                    f"the loop at {self.line} accumulates gradients, and hands more than sums of"
                    f" what depends on weights from each iteration to the next, at {line_of(atom)}:"
                    f" only add to such carries, {_ADVICE}"
                )
        for atom in _only_variables(self.slices.values()):
            if atom in self.of_model:
                raise MicrobatchError(
                    f"the loop at {self.line} accumulates gradients, and what it slices is computed"
                    f" with weights before it, at {line_of(atom)}: compute that in the loop,"
                    f" {_ADVICE}"
                )
        outside = [
            (n, eqn)
            for n, eqn in enumerate(self.eqns)
            if n not in self.inside and eqn.primitive not in _COMBINE
        ]
        of_whole = dependents(outside, [self.jaxpr.invars[i] for i in self.batch])
        for n, eqn in outside:
            record = record_of(eqn)
            is_layer = record.is_contraction or record.runs_body or is_backward(eqn)
            if n not in self.prepared and is_layer and not of_whole.isdisjoint(_variables(eqn)):
                raise MicrobatchError(
                    f"{eqn.primitive.name} at {source_line(eqn)} needs the whole batch, and the"
                    f" loop at {self.line} accumulates gradients of its chunks: compute that in the"
                    f" loop, {_ADVICE}"
                )

    # -- the step without the loop

    def chunk_step(self) -> ChunkStep:
        """Return the step with one iteration in place of the loop."""
        jaxpr = self.jaxpr
        rest = [each for each in enumerate(self.eqns) if each[0] not in self.prepared]
        eqns = [eqn for _, eqn in needed(rest, self.outvars)]
        known = {var for i, var in enumerate(jaxpr.invars) if i not in self.batch}
        known |= {*jaxpr.constvars, *self.body.constvars}
        known.update(var for eqn in eqns for var in eqn.outvars)
        atoms = (*(atom for eqn in eqns for atom in eqn.invars), *self.outvars)
        values = [var for var in dict.fromkeys(_only_variables(atoms)) if var not in known]
        parts = [
            aval_of(var).shape[0] for var in values if self._is_row(var) and self._is_part(var)
        ]
        self._num_examples = min(parts, default=1)
        inputs, first = list[Var](), list[JaxprEqn]()
        for var in values:
            aval = aval_of(var)
            if not self._is_row(var) or self._is_part(var):
                inputs.append(var)
                continue
            impl = impl_of(aval.dtype) if is_key(aval.dtype) else None
            row = jax.eval_shape(_as_numbers, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            inputs.append(Var(ShapedArray((self._num_examples, *row.shape), row.dtype)))
            back = partial(_from_row, impl)
            first += equations(back, inputs[-1:], var, self.scan.source_info)
        constants = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        constants |= zip(self.body.constvars, self.body.consts, strict=True)
        start = len(jaxpr.invars)
        step = jaxpr.replace(
            constvars=list(constants),
            consts=list(constants.values()),
            invars=[*map(self._argument, range(start)), *inputs],
            eqns=[*first, *eqns],
            outvars=self.outvars,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        rows = tuple(map(self._is_row, values))
        return ChunkStep(step, self._preparation(values), rows, self.length, self.line)

    def _argument(self, i: int) -> Var:
        """Return an argument of the step, of one microbatch if it is of the batch."""
        var = self.jaxpr.invars[i]
        if i not in self.batch:
            return var
        rows, *others = aval_of(var).shape
        return Var(aval_of(var).update(shape=(rows // self.length, *others)))

    def _is_row(self, var: Var) -> bool:
        """Return whether each iteration has a value of its own."""
        return var in self.of_iteration

    def _is_part(self, var: Var) -> bool:
        """Return whether the first dim of a value of an iteration is of examples."""
        return var in self.of_batch and aval_of(var).ndim > 0

    def _preparation(self, values: Sequence[Var]) -> Preparation:
        """Return what computes values before the step."""
        jaxpr = self.jaxpr
        constants = {
            **dict(zip(jaxpr.constvars, jaxpr.consts, strict=True)),
            **dict(zip(self.body.constvars, self.body.consts, strict=True)),
        }
        pure = [
            (n, eqn)
            for n, eqn in enumerate(self.eqns)
            if not eqn.effects and eqn.primitive not in _COMBINE
        ]
        rows = [var for var in values if self._is_row(var) and var not in self.slices]
        _, init, after, final = zip(*self.handed_on, strict=True) if self.handed_on else ((),) * 4
        iteration = [
            (n, eqn)
            for n, eqn in needed(pure, [*rows, *after], [*self.slices, *self._carries])
            if not self.of_iteration.isdisjoint(eqn.outvars)
        ]
        operands = {atom for _, eqn in iteration for atom in _variables(eqn)} - self.of_iteration
        wanted = [var for var in values if not self._is_row(var) and var not in final]
        once = needed(pure, [*operands, *wanted, *init, *self.slices.values()])

        def compute(*arguments: jax.Array) -> list[jax.Array]:
            env: dict[Var, Any] = constants | dict(zip(jaxpr.invars, arguments, strict=True))
            evaluate(once, env, unchanged, unchanged)

            def body(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list, list]:
                inner = env | dict(zip(self._carries, carry, strict=True))
                inner |= zip(self.slices, slices, strict=True)
                evaluate(iteration, inner, unchanged, unchanged)
                return [_value(atom, inner) for atom in after], [inner[var] for var in rows]

            first = [_value(atom, env) for atom in init]
            arrays = [_value(atom, env) for atom in self.slices.values()]
            reverse = self.scan.params["reverse"]
            last, stacked = jax.lax.scan(body, first, arrays, self.length, reverse)
            env.update(zip((*final, *self.slices, *rows), (*last, *arrays, *stacked), strict=True))
            return [self._as_input(var, env[var]) for var in values]

        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, jaxpr.invars)]
        traced = flatten(jax.make_jaxpr(compute)(*avals))
        atoms = (*(atom for eqn in traced.eqns for atom in eqn.invars), *traced.outvars)
        read_by = set(_only_variables(atoms))
        return Preparation(
            traced,
            tuple(TracedValue(self.number, k) for k in range(len(values))),
            (self.line,),
            tuple(i for i, var in enumerate(traced.invars) if var in read_by),
        )

    def _as_input(self, var: Var, value: jax.Array) -> jax.Array:
        """Return a value as an input of the microbatches, from those of all iterations.

        Values that are not of examples, such as random keys, are there for each example, so that
        they are cut like the batch.
        """
        if not self._is_row(var):
            return value
        if self._is_part(var):
            return value.reshape(-1, *value.shape[2:])
        return jnp.repeat(_as_numbers(value), self._num_examples, axis=0)


_ADVICE = "or take the gradients of the whole batch in one piece, which num_micro_batches divides"


def _added(scan: JaxprEqn, body: Jaxpr, carry: Var, init: Atom, final: Var) -> list[JaxprEqn]:
    """Return the equations that add what all iterations add to a carry to its first value."""
    (eqn,) = (eqn for eqn in body.eqns if carry in eqn.invars)
    (value,) = (atom for atom in eqn.invars if atom is not carry)
    total, length = Var(aval_of(value)), scan.params["length"]
    if isinstance(value, Literal):
        eqns = equations(lambda each: each * length, [value], total, scan.source_info)
    else:
        eqns = [_marker(scan, chunk_sum_p, value, total)]
    return [*eqns, *equations(jnp.add, [init, total], final, scan.source_info)]


def _stacked(scan: JaxprEqn, value: Atom, final: Var) -> list[JaxprEqn]:
    """Return the equations that put a value of all iterations together."""
    aval = aval_of(value)
    row = Var(aval_of(final).update(shape=(1, *aval.shape)))
    as_row = partial(jnp.reshape, shape=(1, *aval.shape))
    return [
        *equations(as_row, [value], row, scan.source_info),
        _marker(scan, chunk_rows_p, row, final),
    ]


def _marker(scan: JaxprEqn, primitive: Primitive, operand: Atom, result: Var) -> JaxprEqn:
    return scan.replace(
        primitive=primitive, invars=[operand], outvars=[result], params={}, effects=frozenset()
    )


def _as_numbers(value: jax.Array) -> jax.Array:
    """Return the numbers of random keys; other values as they are."""
    return jax.random.key_data(value) if is_key(value.dtype) else value


def _from_row(impl: str | None, rows: jax.Array) -> jax.Array:
    """Return the value of an iteration, from rows that are all equal.

    Args:
        impl: the implementation if the value is of random keys.
        rows: the rows.
    """
    row = jax.lax.index_in_dim(rows, 0, keepdims=False)
    return row if impl is None else jax.random.wrap_key_data(row, impl=impl)


def _value(atom: Atom, env: dict[Var, Any]) -> jax.Array:
    return jnp.asarray(read(atom, env), aval_of(atom).dtype)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return _only_variables(eqn.invars)


def _only_variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]
