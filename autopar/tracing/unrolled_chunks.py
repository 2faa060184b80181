"""Gradients of chunks that a step adds without a loop, such as in a `for` loop of Python.

The step then has a copy of its equations for each chunk. If the copies correspond
(`autopar.tracing.chunk_comparison`), they are rewritten as a loop over the chunks
(`autopar.tracing.chunk_loop`). Values that differ between the chunks and depend on no weights are
slices of the loop: the examples of a chunk, its key, or its weight in the loss. The loop has a
carry for each sum over all chunks, and stacks the values that the step stacks or concatenates. A
chunk may add several terms to a sum, such as the gradients of two losses.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import concatenate_p
from jax.lax import stack_p

from autopar.ir.equation_groups import dependents
from autopar.ir.graph import (
    Atom,
    aval_of,
    is_backward,
    needed_eqns,
    renamed,
    rewired,
    scopes,
    source_line,
    variables,
)
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.deferred_division import equations
from autopar.primitives import record_of
from autopar.tracing.chunk_comparison import ChunkComparison, are_alike
from autopar.tracing.chunk_loop import ChunkLoop, loop_equations, stacked_variable, zero_equations


class _Result(NamedTuple):
    """A value that a step computes from terms of all chunks: their sum, or a stack of them.

    Attributes:
        eqn: the last addition of the sum, or the stack or concatenation along the first dim.
        terms: the terms of each chunk.
        others: terms of the sum that belong to no chunk.
    """

    eqn: JaxprEqn
    terms: tuple[tuple[Var, ...], ...]
    others: tuple[Atom, ...] = ()

    def is_of(self, values: Collection[Var]) -> bool:
        """Return whether all terms are among some values."""
        return all(term in values for terms in self.terms for term in terms)

    @property
    def is_row(self) -> bool:
        """Whether the result is a stack of one term per chunk."""
        return self.eqn.primitive is stack_p and len(self.terms[0]) == 1

    @property
    def aval_of_chunk(self) -> ShapedArray:
        """The type of the part of the result that one chunk contributes."""
        aval = aval_of(self.eqn.outvars[0])
        if not _is_stack(self.eqn):
            return aval_of(self.terms[0][0])
        rows, *others = aval.shape
        return aval.update(shape=(rows // len(self.terms), *others))

    def together(self, *terms: jax.Array) -> jax.Array:
        """Return the part of the result that one chunk contributes, from its terms."""
        if not _is_stack(self.eqn):
            return _sum(*terms)
        return (jnp.stack if self.eqn.primitive is stack_p else jnp.concatenate)(terms)

    def arrangements(self, count: int) -> "list[_Result]":
        """Return the ways to divide terms of single chunks among `count` chunks of several terms.

        A chunk has neighbouring terms, as in a1 + a2 + b1 + b2, or every `count`-th term of a sum,
        as in a1 + b1 + a2 + b2. There is no way if `count` does not divide the number of terms.
        """
        terms = [term for (term,) in self.terms]
        size, rest = divmod(len(terms), count)
        if rest:
            return []
        found = [tuple(tuple(terms[k * size :][:size]) for k in range(count))]
        if size > 1 and not _is_stack(self.eqn):
            found.append(tuple(tuple(terms[k::count]) for k in range(count)))
        return [self._replace(terms=each) for each in found]


class UnlikeChunksError(MicrobatchError):
    """A step adds gradients of chunks that it does not compute alike.

    Attributes:
        count: the number of chunks.
    """

    def __init__(self, line: str, count: int, difference: str) -> None:
        """Describe the error.

        Args:
            line: the line of the sum, as "FILE:LINE".
            count: the number of chunks.
            difference: what is not the same for all chunks.
        """
        self.count = count
        super().__init__(
            f"the {count} gradients that are added at {line} are not computed alike: {difference};"
            " chunks may only have other numbers and examples, such as x * 2.0 for x * 3.0"
        )


class _Chunks(NamedTuple):
    """The chunks of a step, for one number of chunks.

    Attributes:
        results: the results whose terms the step computes alike for all chunks.
        comparisons: the comparisons of the first chunk with each other one.
    """

    results: list[_Result]
    comparisons: list[ChunkComparison]


def unrolled_chunks(jaxpr: Jaxpr, of_model: set[Var]) -> tuple[Jaxpr, ChunkLoop] | None:
    """Return a step with a loop over its chunks, and the loop; None if it has no such chunks.

    Every number of chunks is tried that divides the number of terms of a sum of gradients. The
    number with the most results that depend on gradients is taken; of several, the largest.

    Args:
        jaxpr: the step, flat but for its loops.
        of_model: the values that depend on weights.

    Raises:
        UnlikeChunksError: The step adds gradients that it does not compute alike.
    """
    jaxpr, literals = _with_named_literals(jaxpr, of_model)
    backward = [var for eqn in jaxpr.eqns if is_backward(eqn) for var in eqn.outvars]
    gradients = dependents(enumerate(jaxpr.eqns), backward)
    candidates = [*_sums(jaxpr, of_model, gradients), *_stacks(jaxpr, of_model)]
    candidates.sort(key=lambda candidate: not candidate.is_of(gradients))
    sizes = {len(each.terms) for each in candidates if each.is_of(gradients)}
    counts = {count for size in sizes for count in range(2, size + 1) if size % count == 0}
    best, most = None, 0
    for count in sorted(counts, reverse=True):
        chunks = _chunks(jaxpr, literals, of_model, candidates, count)
        num_gradients = sum(result.is_of(gradients) for result in chunks.results)
        if num_gradients > most:
            best, most = chunks, num_gradients
    if best is not None:
        return _rolled(jaxpr, literals, best)
    for candidate in candidates:
        count = len(candidate.terms)
        comparisons = [ChunkComparison([jaxpr], of_model) for _ in range(count - 1)]
        are_alike(comparisons, candidate.terms)
        difference = next((each.difference for each in comparisons if each.unequal), "")
        if difference and candidate.is_of(gradients):
            raise UnlikeChunksError(source_line(candidate.eqn), count, difference)
    return None


def _with_named_literals(jaxpr: Jaxpr, of_model: set[Var]) -> tuple[Jaxpr, dict[Var, Literal]]:
    """Return a step whose literals, beside values that depend on weights, are named by variables.

    Such numbers may differ between the chunks, as the weight of a chunk in the loss does.

    Args:
        jaxpr: the step.
        of_model: the values that depend on weights.

    Returns:
        The step, and the literal of each variable.
    """
    literals: dict[Var, Literal] = {}

    def named(atom: Atom) -> Atom:
        if not isinstance(atom, Literal):
            return atom
        var = Var(aval_of(atom))
        literals[var] = atom
        return var

    eqns = [
        eqn.replace(invars=list(map(named, eqn.invars)))
        if not of_model.isdisjoint(variables(eqn.invars))
        else eqn
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns), literals


def _chunks(
    jaxpr: Jaxpr,
    literals: Mapping[Var, Literal],
    of_model: set[Var],
    candidates: Sequence[_Result],
    count: int,
) -> _Chunks:
    """Return the chunks of a step if there are `count` of them.

    Args:
        jaxpr: the step.
        literals: the literals that are named by variables.
        of_model: the values that depend on weights.
        candidates: possible results, with one term per chunk.
        count: the number of chunks.
    """
    constants = [np.asarray(literal.val) for literal in literals.values()]
    named = jaxpr.replace(
        constvars=[*jaxpr.constvars, *literals], consts=[*jaxpr.consts, *constants]
    )
    comparisons = [ChunkComparison([named], of_model) for _ in range(count - 1)]
    results = [
        next((each for each in options if are_alike(comparisons, each.terms)), None)
        for options in (candidate.arrangements(count) for candidate in candidates)
    ]
    alike = [result for result in results if result is not None]
    return _Chunks(_independent(jaxpr, alike), comparisons)


def _independent(jaxpr: Jaxpr, results: list[_Result]) -> list[_Result]:
    """Return the results whose terms depend on none of the results."""
    while True:
        ends = [var for result in results for var in result.eqn.outvars]
        late = dependents(enumerate(jaxpr.eqns), ends)
        early = [r for r in results if all(map(late.isdisjoint, r.terms))]
        if len(early) == len(results):
            return results
        results = early


def _sums(jaxpr: Jaxpr, of_model: set[Var], gradients: set[Var]) -> list[_Result]:
    """Return the sums of several terms that depend on weights.

    Additions that differentiation makes are left out. If several terms are gradients, only these
    are terms of chunks.

    Args:
        jaxpr: the step.
        of_model: the values that depend on weights.
        gradients: the values that depend on gradients.
    """
    additions = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if record_of(eqn).is_addition and not is_backward(eqn) and "jvp(" not in scopes(eqn)
    }
    readers = Counter(atom for eqn in jaxpr.eqns for atom in variables(eqn.invars))
    readers.update(variables(jaxpr.outvars))
    inner = {
        atom
        for eqn in additions.values()
        for atom in variables(eqn.invars)
        if atom in additions and readers[atom] == 1
    }

    def terms_of(atom: Atom) -> list[Atom]:
        pending, terms = [atom], []
        while pending:
            term = pending.pop()
            if isinstance(term, Var) and term in additions and (term is atom or term in inner):
                pending += reversed(additions[term].invars)
            else:
                terms.append(term)
        return terms

    found: list[_Result] = []
    for var, eqn in additions.items():
        terms = terms_of(var) if var not in inner else []
        for chosen in (gradients, of_model):
            own = tuple(term for term in variables(terms) if term in chosen)
            if len(set(own)) > 1:
                others = tuple(t for t in terms if not isinstance(t, Var) or t not in chosen)
                if len({aval_of(term).shape for term in own}) == 1:
                    found.append(_Result(eqn, tuple((term,) for term in own), others))
                break
    return found


def _stacks(jaxpr: Jaxpr, of_model: set[Var]) -> list[_Result]:
    """Return the stacks, and concatenations of the first dim, of values that depend on weights.

    A value that is only repeated is no result of chunks.
    """
    return [
        _Result(eqn, tuple((var,) for var in variables(eqn.invars)))
        for eqn in jaxpr.eqns
        if _is_stack(eqn) and not is_backward(eqn)
        if len(set(variables(eqn.invars))) > 1 and of_model.issuperset(variables(eqn.invars))
        if len({aval_of(atom).shape for atom in eqn.invars}) == 1
    ]


def _is_stack(eqn: JaxprEqn) -> bool:
    dim = {concatenate_p: "dimension", stack_p: "axis"}.get(eqn.primitive)
    return dim is not None and eqn.params[dim] == 0


def _rolled(
    jaxpr: Jaxpr, literals: Mapping[Var, Literal], chunks: _Chunks
) -> tuple[Jaxpr, ChunkLoop]:
    """Return a step with a loop over its chunks, and the loop.

    Args:
        jaxpr: the step.
        literals: the literals that are named by variables.
        chunks: its chunks.
    """
    comparisons = chunks.comparisons
    sums = [result for result in chunks.results if not _is_stack(result.eqn)]
    rows = [result for result in chunks.results if _is_stack(result.eqn)]
    results = [*sums, *rows]
    differing = {var for comparison in comparisons for var in comparison.differing}
    equal = [var for var in comparisons[0].equal if _is_of_all(var, comparisons)]
    common = {var: literal for var, literal in literals.items() if var not in differing}
    terms = [term for result in results for term in result.terms[0]]
    eqns = [rewired(eqn, common) for eqn in needed_eqns(jaxpr.eqns, terms, differing.union(equal))]
    read = dict.fromkeys(variables([*(atom for eqn in eqns for atom in eqn.invars), *terms]))
    slices = [var for var in read if var in differing]
    computed = {var for eqn in eqns for var in eqn.outvars}.union(slices, jaxpr.constvars)
    consts = [var for var in read if var not in computed]
    # A value that a comparison has not reached is the same variable for both of its chunks.
    values = [[var, *(each.equal.get(var, var) for each in comparisons)] for var in slices]
    length, source = len(comparisons) + 1, results[0].eqn.source_info
    carries, zeros = ([Var(aval_of(r.terms[0][0])) for r in sums] for _ in range(2))
    totals = [Var(aval_of(r.terms[0][0])) if r.others else r.eqn.outvars[0] for r in sums]
    arrays = [stacked_variable(var, length) for var in slices]
    body = _body(jaxpr, consts, carries, slices, eqns, results)
    stacked = [
        result.eqn.outvars[0] if result.is_row else stacked_variable(end, length)
        for result, end in zip(rows, variables(body.outvars)[len(sums) :], strict=True)
    ]
    loop = results[0].eqn.replace(
        invars=[*consts, *zeros, *arrays], outvars=[*totals, *stacked], effects=frozenset()
    )
    operands = [renamed(row, literals) for row in values]
    before = [
        *loop_equations(lambda *rows: list(map(jnp.stack, rows)), operands, arrays, source),
        *zero_equations(zeros, source),
    ]
    after = _final_equations(results, loop)
    step = _with_loop(jaxpr, [result.eqn for result in results], [*before, loop, *after])
    eqns = [eqn if eqn is loop else rewired(eqn, literals) for eqn in step.eqns]
    return step.replace(eqns=eqns), ChunkLoop(
        loop, body, consts, zeros, arrays, loop.outvars, length, is_reversed=False
    )


def _final_equations(results: Sequence[_Result], loop: JaxprEqn) -> list[JaxprEqn]:
    """Return the equations that compute results of all chunks from the results of their loop."""
    eqns: list[JaxprEqn] = []
    for result, total in zip(results, loop.outvars, strict=True):
        (final,) = result.eqn.outvars
        if _is_stack(result.eqn) and not result.is_row:
            reshape = partial(jnp.reshape, shape=aval_of(final).shape)
            eqns += equations(reshape, [total], final, loop.source_info)
        elif result.others:
            eqns += equations(_sum, [*result.others, total], final, loop.source_info)
    return eqns


def _is_of_all(var: Var, comparisons: Iterable[ChunkComparison]) -> bool:
    """Return whether a value is the same variable for all chunks."""
    return all(comparison.equal.get(var) is var for comparison in comparisons)


def _sum(*values: jax.Array) -> jax.Array:
    return reduce(jnp.add, values)


def _body(
    jaxpr: Jaxpr,
    consts: Sequence[Var],
    carries: Sequence[Var],
    slices: Sequence[Var],
    eqns: Sequence[JaxprEqn],
    results: Sequence[_Result],
) -> Jaxpr:
    """Return the body of a loop over chunks, from the equations of the first chunk.

    Args:
        jaxpr: the step.
        consts: the values that all iterations read.
        carries: the sums.
        slices: the values of the first chunk that differ between the chunks.
        eqns: the equations.
        results: the results of all chunks, the sums first.
    """
    names = {var: Var(var.aval) for var in (*slices, *(v for eqn in eqns for v in eqn.outvars))}
    copies = [
        eqn.replace(invars=renamed(eqn.invars, names), outvars=[names[var] for var in eqn.outvars])
        for eqn in eqns
    ]
    ends: list[Atom] = []
    source = copies[0].source_info
    for result in results:
        terms = renamed(result.terms[0], names)
        if len(terms) > 1:
            together = Var(result.aval_of_chunk)
            copies += equations(result.together, terms, together, source)
            terms = [together]
        ends += terms
    for k, carry in enumerate(carries):
        after = Var(carry.aval)
        copies += equations(jnp.add, [carry, ends[k]], after, source)
        ends[k] = after
    return jaxpr.replace(
        invars=[*consts, *carries, *(names[var] for var in slices)],
        outvars=ends,
        eqns=copies,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _with_loop(jaxpr: Jaxpr, replaced: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Return a step with the equations `eqns` in place of `replaced`, which compute its results.

    Equations that depend on the results follow them; all others come first.
    """
    ends = [var for eqn in replaced for var in eqn.outvars]
    numbers = {id(eqn) for eqn in replaced}
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in numbers]
    late = dependents(enumerate(others), ends)
    step = [eqn for eqn in others if late.isdisjoint(eqn.outvars)]
    step += eqns
    step += [eqn for eqn in others if not late.isdisjoint(eqn.outvars)]
    return jaxpr.replace(eqns=needed_eqns(step, jaxpr.outvars))
