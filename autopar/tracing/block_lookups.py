"""Write lookups among the rows of one example as lookups with a batch dim.

A batch of graphs or point clouds may be one array with `n` rows for each example. Row `k` of
example `i` has the number `i * n + k`, so an edge or a neighbour is a number of the whole batch. As
a gather with a batch dim, the lookup needs only `k`, which is the same in a microbatch. Scatters,
such as those of `jax.ops.segment_sum`, are written alike.

That needs a proof that no example refers to the rows of another one: the numbers are constants, or
a constant plus numbers within bounds, such as those of `top_k`, `argsort` or `clip`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import gather_p, select_n_p

from autopar.ir.control_flow import SHIFTS
from autopar.ir.equation_groups import dependents
from autopar.ir.evaluate import bind
from autopar.ir.graph import Atom, aval_of, needed_eqns, rewired
from autopar.microbatch.batch_rows import num_examples
from autopar.microbatch.deferred_division import equations
from autopar.primitives.index import is_scatter
from autopar.primitives.index_dims import IndexDims
from autopar.tracing.row_tables import MOST_ELEMENTS, core, known_literal, known_result


def with_own_blocks(
    jaxpr: Jaxpr, batch: Collection[int], resized: Callable[[], Jaxpr | None]
) -> Jaxpr:
    """Return a flat jaxpr whose lookups among an example's own rows have a batch dim.

    Args:
        jaxpr: the flat jaxpr of a step.
        batch: inputs whose first dim is the batch. What is read from arrays that depend on others
            alone is left: a table has as many rows by coincidence.
        resized: returns the jaxpr of the step for a batch of another size, or None. Rows that are
            as many in both are no rows of examples, such as the positions in a sequence.
    """
    examples = num_examples(jaxpr, batch)
    if examples < 2 or not any(_is_lookup(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    numbered = list(enumerate(jaxpr.eqns))
    lookups = _BlockLookups(
        examples,
        dependents(numbered, (jaxpr.invars[i] for i in batch)),
        dependents(numbered, (*jaxpr.constvars, *jaxpr.invars)),
        _Growth(jaxpr, resized),
    )
    for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        lookups.add_constant(var, value)
    for number, eqn in numbered:
        lookups.add(number, eqn)
    if not lookups.num_changed:
        return jaxpr
    return jaxpr.replace(
        constvars=[*jaxpr.constvars, *lookups.tables],
        consts=[*jaxpr.consts, *lookups.tables.values()],
        eqns=needed_eqns(lookups.eqns, jaxpr.outvars),
    )


class _Bounds(NamedTuple):
    """What is known of an integer array: each element is that of `base` plus a number in bounds.

    Attributes:
        base: an array of int64 with the shape of the array; repeated elements have stride zero.
        low: the least number.
        high: the largest number.
    """

    base: np.ndarray
    low: int = 0
    high: int = 0

    def interval(self) -> tuple[int, int]:
        """Return bounds of all elements."""
        return int(core(self.base).min()) + self.low, int(core(self.base).max()) + self.high


@dataclass
class _Growth:
    """Which dims grow with the batch.

    Attributes:
        jaxpr: the jaxpr of a step.
        resized: returns its jaxpr for a batch of another size, or None.
    """

    jaxpr: Jaxpr
    resized: Callable[[], Jaxpr | None]

    @cached_property
    def _other(self) -> Jaxpr | None:
        other = self.resized()
        return other if other and len(other.eqns) == len(self.jaxpr.eqns) else None

    def of_operand(self, number: int, operand: int, dim: int) -> bool:
        """Return whether a dim of an operand grows with the batch; True if that is not known.

        Args:
            number: the number of the equation.
            operand: the number of the operand.
            dim: the dim.
        """
        if self._other is None:
            return True
        eqns = self.jaxpr.eqns[number], self._other.eqns[number]
        if eqns[0].primitive is not eqns[1].primitive:
            return True
        size, other = (aval_of(eqn.invars[operand]).shape[dim] for eqn in eqns)
        return size != other


@dataclass
class _BlockLookups:
    """The equations so far, and what is known of integers.

    Attributes:
        examples: the number of examples in the batch.
        depending: the values that depend on the batch.
        of_inputs: the values that depend on some input or constant of the trace.
        growth: which dims grow with the batch.
        eqns: the equations, with lookups among own rows written with batch dims.
        tables: constants of the new equations.
        num_changed: the number of lookups that were changed.
        bounds: what is known of integer arrays.
        truths: truth values that are the same everywhere.
        same: the atoms that replace variables which are equal to them.
    """

    examples: int
    depending: Collection[Atom]
    of_inputs: Collection[Atom]
    growth: _Growth
    eqns: list[JaxprEqn] = field(default_factory=list)
    tables: dict[Var, np.ndarray] = field(default_factory=dict)
    num_changed: int = 0
    bounds: dict[Var, _Bounds] = field(default_factory=dict)
    truths: dict[Var, bool] = field(default_factory=dict)
    same: dict[Var, Atom] = field(default_factory=dict)

    def add_constant(self, var: Var, value: Any) -> None:
        """Note what is known of a constant of the trace."""
        aval = aval_of(var)
        if aval.size and aval.dtype == bool:
            truths = np.unique(np.asarray(value))
            if truths.size == 1:
                self.truths[var] = bool(truths[0])
        elif aval.size and jnp.issubdtype(aval.dtype, jnp.integer):
            self.bounds[var] = _known(np.asarray(value))

    def add(self, number: int, eqn: JaxprEqn) -> None:
        """Append an equation, which has this number in the trace."""
        eqn = rewired(eqn, self.same)
        if not (_is_lookup(eqn) and self._add_lookup(number, eqn)):
            self.eqns.append(eqn)
        if eqn.primitive is select_n_p and (truth := self._truth(eqn.invars[0])) is not None:
            self.same[eqn.outvars[0]] = eqn.invars[1 + truth]
            return
        for result, var in enumerate(eqn.outvars):
            aval = aval_of(var)
            if not hasattr(aval, "dtype") or not aval.size:
                continue
            if aval.dtype == bool:
                if (truth := self._compared(eqn)) is not None:
                    self.truths[var] = truth
            elif jnp.issubdtype(aval.dtype, jnp.integer):
                known = self._result(eqn, result)
                if known is not None and _fits(known.interval(), aval.dtype):
                    self.bounds[var] = known

    # -- what is known

    def _truth(self, atom: Atom) -> bool | None:
        return self.truths.get(atom) if isinstance(atom, Var) else None

    def _of(self, atom: Atom) -> _Bounds | None:
        """Return what is known of an integer array; None for other arrays."""
        if isinstance(atom, Var) and atom in self.bounds:
            return self.bounds[atom]
        aval = aval_of(atom)
        if not jnp.issubdtype(aval.dtype, jnp.integer):
            return None
        literal = known_literal(atom)
        if literal is not None:
            return _known(np.broadcast_to(literal, aval.shape))
        limits = jnp.iinfo(aval.dtype)
        return _within(int(limits.min), int(limits.max), aval.shape)

    def _compared(self, eqn: JaxprEqn) -> bool | None:
        """Return the result of a comparison, if it is the same everywhere."""
        name = eqn.primitive.name
        if name in ("broadcast_in_dim", "reshape", "squeeze", "loop_const"):
            return self._truth(eqn.invars[0])
        if name == "and" and any(self._truth(atom) is False for atom in eqn.invars):
            return False
        if len(eqn.invars) != 2:
            return None
        first, second = eqn.invars
        truth, other = self._truth(first), self._truth(second)
        if name == "ne" and truth is not None and other is not None:
            return truth != other
        a, b = self._of(first), self._of(second)
        if a is None or b is None:
            return None
        return _comparison(name, a.interval(), b.interval())

    def _result(self, eqn: JaxprEqn, number: int) -> _Bounds | None:
        """Return what is known of a result that consists of integers."""
        shape = aval_of(eqn.outvars[number]).shape
        operands = [self._of(atom) for atom in eqn.invars if hasattr(aval_of(atom), "dtype")]
        match eqn.primitive.name, operands:
            case "argmax" | "argmin", _:
                axes = eqn.params["axes"]
                return _within(0, max(aval_of(eqn.invars[0]).shape[a] for a in axes) - 1, shape)
            case "top_k", _ if number == 1:
                operand = aval_of(eqn.invars[0]).shape
                return _within(0, operand[eqn.params.get("axis", len(shape) - 1)] - 1, shape)
            case "sort", _ if (known := operands[number]) is not None:
                return _within(*known.interval(), shape)
            case "iota", _:
                numbers = known_result(eqn, [])
                return _known(numbers) if isinstance(numbers, np.ndarray) else None
            case "add", [_Bounds() as a, _Bounds() as b]:
                return _combined(np.add, a, b, shape, a.low + b.low, a.high + b.high)
            case "sub", [_Bounds() as a, _Bounds() as b]:
                return _combined(np.subtract, a, b, shape, a.low - b.high, a.high - b.low)
            case "mul", [_Bounds() as a, _Bounds() as b]:
                return _product(a, b, shape) or _product(b, a, shape)
            case "max" | "min" as name, [_Bounds() as a, _Bounds() as b]:
                pick = max if name == "max" else min
                low, high = map(pick, a.interval(), b.interval())
                return _within(low, high, shape)
            case "clamp", [_Bounds() as least, _Bounds() as x, _Bounds() as most]:
                low, high = map(max, least.interval(), x.interval())
                low, high = map(min, (low, high), most.interval())
                return _within(low, high, shape)
            case "rem", [_Bounds() as x, _Bounds() as by] if by.interval()[0] > 0:
                largest = by.interval()[1] - 1
                return _within(0 if x.interval()[0] >= 0 else -largest, largest, shape)
            case "select_n", [_, *cases] if all(case is not None for case in cases):
                ends = [case.interval() for case in cases if case is not None]
                return _within(min(low for low, _ in ends), max(high for _, high in ends), shape)
            case "convert_element_type" | "copy", [_Bounds() as of]:
                return of
            case "broadcast_in_dim" | "reshape" | "squeeze", [_Bounds() as of]:
                base = known_result(eqn, [of.base])
                return of._replace(base=base) if isinstance(base, np.ndarray) else None
            case "transpose", [_Bounds() as of]:
                return of._replace(base=of.base.transpose(eqn.params["permutation"]))
            case "loop_const", [_Bounds() as of, *_] if eqn.primitive in SHIFTS:
                return of
        return None

    # -- lookups

    def _add_lookup(self, number: int, eqn: JaxprEqn) -> bool:
        """Append a gather or scatter with a batch dim; return whether it can have one."""
        operand = eqn.invars[0]
        is_table = operand in self.of_inputs and operand not in self.depending
        if eqn.primitive is gather_p and is_table:
            return False
        lookup = IndexDims.of(eqn)
        known = self._of(eqn.invars[1])
        if len(lookup.indexed) != 1 or lookup.indexed[0] not in lookup.dropped or known is None:
            return False
        (dim,) = lookup.indexed
        rows = aval_of(eqn.invars[0]).shape[dim]
        places = aval_of(eqn.invars[1]).shape
        if rows % self.examples:
            return False
        of_example = rows // self.examples
        for at, size in enumerate(places[:-1]):
            if size % self.examples or at in lookup.batched.values():
                continue
            local = _local(known, at, self.examples, of_example)
            if local is None:
                continue
            is_constant = known.low == known.high == 0
            if is_constant and np.any(core(local.base) != np.take(core(local.base), [0], at)):
                continue
            dims = (0, dim), (1, at)
            if not all(self.growth.of_operand(number, *each) for each in dims):
                continue
            self.num_changed += 1
            indices = eqn.invars[1]
            if is_constant:
                table = local.base.take(0, at).astype(aval_of(indices).dtype)
                indices = Var(ShapedArray(table.shape, table.dtype))
                self.tables[indices] = table
            own = partial(_looked_up, eqn, lookup, at, self.examples, is_constant)
            operands = [eqn.invars[0], indices, *eqn.invars[2:]]
            self.eqns += equations(own, operands, eqn.outvars[0], eqn.source_info)
            return True
        return False


def _is_lookup(eqn: JaxprEqn) -> bool:
    return eqn.primitive is gather_p or is_scatter(eqn)


def _fits(interval: tuple[int, int], dtype: Any) -> bool:
    """Return whether integers in these bounds can be elements of an array."""
    limits = jnp.iinfo(dtype)
    return int(limits.min) <= interval[0] and interval[1] <= int(limits.max)


def _comparison(name: str, a: tuple[int, int], b: tuple[int, int]) -> bool | None:
    """Return the result of a comparison of integers in these bounds, if it is always the same."""
    match name:
        case "gt" | "le":
            result = _comparison("lt", b, a)
            return result if name == "gt" or result is None else not result
        case "lt" | "ge" if a[1] < b[0] or a[0] >= b[1]:
            return (a[1] < b[0]) == (name == "lt")
        case "eq" | "ne" if a[1] < b[0] or b[1] < a[0]:
            return name == "ne"
    return None


def _known(numbers: np.ndarray) -> _Bounds:
    return _Bounds(np.broadcast_to(core(numbers).astype(np.int64), numbers.shape))


def _within(low: int, high: int, shape: tuple[int, ...]) -> _Bounds:
    return _Bounds(np.broadcast_to(np.int64(0), shape), low, high)


def _combined(
    fun: Any, a: _Bounds, b: _Bounds, shape: tuple[int, ...], low: int, high: int
) -> _Bounds | None:
    """Return what is known of a sum or difference."""
    parts = core(a.base), core(b.base)
    if np.broadcast(*parts).size > MOST_ELEMENTS:
        return None
    return _Bounds(np.broadcast_to(fun(*parts), shape), low, high)


def _product(a: _Bounds, b: _Bounds, shape: tuple[int, ...]) -> _Bounds | None:
    """Return what is known of a product if `b` is one number that is not negative."""
    low, high = b.interval()
    if low != high or low < 0:
        return None
    return _Bounds(np.broadcast_to(core(a.base) * low, shape), a.low * low, a.high * low)


def _local(known: _Bounds, at: int, examples: int, rows: int) -> _Bounds | None:
    """Return numbers within an example's own rows; None if they may be those of another one.

    Args:
        known: what is known of numbers in the whole batch.
        at: the dim of these numbers that has those of each example in turns.
        examples: the number of examples.
        rows: the number of rows of an example.

    Returns:
        What is known of the numbers within the rows, with the examples in a dim of their own.
    """
    shape = known.base.shape
    size = shape[at] // examples
    if known.base.size > MOST_ELEMENTS:
        return None
    apart = known.base.reshape(*shape[:at], examples, size, *shape[at + 1 :])
    first = np.arange(examples) * rows
    base = apart - first.reshape(-1, *(1,) * (apart.ndim - at - 1))
    local = _Bounds(base, known.low, known.high)
    low, high = local.interval()
    return local if low >= 0 and high < rows else None


def _with_examples(lookup: IndexDims, at: int, out: int) -> IndexDims:
    """Return the dims of a lookup if the dims of examples are apart from their rows.

    Args:
        lookup: the dims of the lookup, of which one is indexed.
        at: the dim of the indices with those of each example in turns.
        out: the dim of the result, or of the updates, that follows from it.
    """
    (dim,) = lookup.indexed
    batched = {d + (d > dim): i + (i > at) for d, i in lookup.batched.items()}
    return IndexDims(
        windows=tuple(w + (w > out) for w in lookup.windows),
        dropped=tuple(d + (d >= dim) for d in lookup.dropped),
        indexed=(dim + 1,),
        batched=batched | {dim: at},
    )


def _looked_up(
    eqn: JaxprEqn,
    lookup: IndexDims,
    at: int,
    examples: int,
    is_constant: bool,
    operand: jax.Array,
    indices: jax.Array,
    *updates: jax.Array,
) -> jax.Array:
    """Return the result of a gather or scatter, computed with a batch dim.

    Args:
        eqn: the equation.
        lookup: its dims, of which one is indexed.
        at: the dim of the indices that has those of each example in turns.
        examples: the number of examples.
        is_constant: whether `indices` are those of one example within its own rows.
        operand: the array that is read or updated.
        indices: the index vectors.
        updates: what a scatter writes.
    """

    def apart(array: jax.Array, dim: int) -> jax.Array:
        size = array.shape[dim] // examples
        return array.reshape(*array.shape[:dim], examples, size, *array.shape[dim + 1 :])

    (dim,) = lookup.indexed
    rows = operand.shape[dim] // examples
    if is_constant:
        shape = (*indices.shape[:at], examples, *indices.shape[at:])
        kept = [dim for dim in range(len(shape)) if dim != at]
        indices = lax.broadcast_in_dim(indices, shape, kept)
    else:
        indices = apart(indices, at)
        indices -= rows * lax.broadcasted_iota(indices.dtype, indices.shape, at)
    target = aval_of(eqn.outvars[0]).shape
    rank = len(aval_of(eqn.invars[2]).shape) if updates else len(target)
    out = [dim for dim in range(rank) if dim not in lookup.windows][at]
    params = {"dimension_numbers": _with_examples(lookup, at, out).numbers(eqn)}
    if not updates:
        sizes = list(eqn.params["slice_sizes"])
        params["slice_sizes"] = (*sizes[:dim], 1, *sizes[dim:])
    operands = [apart(operand, dim), indices, *(apart(each, out) for each in updates)]
    (result,) = bind(eqn, operands, **params)
    return result.reshape(target)
