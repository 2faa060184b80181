"""Gradients of chunks that a step adds without a loop, such as in a `for` loop of Python.

The step has equations of its own for each chunk. If they compute the same, but for values that
depend on no weights, such as the examples of a chunk or its key, they are rewritten as a loop over
the chunks (`autopar.tracing.chunk_loop`). The loop has a carry for each sum over all chunks, and
stacks what is concatenated of all chunks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import concatenate_p
from jax.lax import stack_p

from autopar.ir.equation_groups import dependents
from autopar.ir.graph import Atom, aval_of, is_backward, needed, renamed, scopes, variables
from autopar.microbatch.deferred_division import equations
from autopar.primitives import record_of
from autopar.tracing.chunk_comparison import ChunkComparison
from autopar.tracing.chunk_loop import ChunkLoop, loop_equations, stacked_variable, zero_equations


class _Result(NamedTuple):
    """A result of all chunks.

    Attributes:
        eqn: The last addition of a sum, or what stacks or concatenates along the first dim.
        terms: The value of each chunk.
        others: What is added to a sum besides.
    """

    eqn: JaxprEqn
    terms: tuple[Var, ...]
    others: tuple[Atom, ...] = ()


def unrolled_chunks(jaxpr: Jaxpr, of_model: set[Var]) -> tuple[Jaxpr, ChunkLoop] | None:
    """Return a step with a loop over its chunks, and the loop; None if it has no such chunks.

    Args:
        jaxpr: The step, flat but for its loops.
        of_model: The values that depend on weights.
    """
    backward = [var for eqn in jaxpr.eqns if is_backward(eqn) for var in eqn.outvars]
    gradients = dependents(enumerate(jaxpr.eqns), backward)
    candidates = [*_sums(jaxpr, of_model, gradients), *_stacks(jaxpr, of_model)]
    counts = Counter(len(c.terms) for c in candidates if gradients.issuperset(c.terms))
    if not counts:
        return None
    ((count, _),) = counts.most_common(1)
    candidates.sort(key=lambda each: not gradients.issuperset(each.terms))
    comparisons = [ChunkComparison([jaxpr], of_model) for _ in range(count - 1)]
    results = [c for c in candidates if len(c.terms) == count and _are_alike(c, comparisons)]
    results = _independent(jaxpr, results)
    if not any(gradients.issuperset(result.terms) for result in results):
        return None
    return _rolled(jaxpr, results, comparisons)


def _independent(jaxpr: Jaxpr, results: list[_Result]) -> list[_Result]:
    """Return the results that do not depend on one of them."""
    while True:
        ends = [var for result in results for var in result.eqn.outvars]
        inner = [term for result in results for term in result.terms]
        late = dependents(enumerate(jaxpr.eqns), ends)
        if late.isdisjoint(inner):
            return results
        results = [result for result in results if late.isdisjoint(result.terms)]


def _sums(jaxpr: Jaxpr, of_model: set[Var], gradients: set[Var]) -> list[_Result]:
    """Return the sums, which no derivative consists of, of several values that depend on weights.

    Where gradients are added to other values that depend on weights, these are other terms.
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
            if len(own) > 1:
                others = tuple(t for t in terms if not isinstance(t, Var) or t not in chosen)
                found.append(_Result(eqn, own, others))
                break
    return [each for each in found if len({aval_of(term).shape for term in each.terms}) == 1]


def _stacks(jaxpr: Jaxpr, of_model: set[Var]) -> list[_Result]:
    """Return what stacks or concatenates, along the first dim, values that depend on weights."""
    return [
        _Result(eqn, tuple(variables(eqn.invars)))
        for eqn in jaxpr.eqns
        if _is_stack(eqn) and not is_backward(eqn)
        if of_model.issuperset(variables(eqn.invars))
        if len({aval_of(atom).shape for atom in eqn.invars}) == 1
    ]


def _is_stack(eqn: JaxprEqn) -> bool:
    dim = {concatenate_p: "dimension", stack_p: "axis"}.get(eqn.primitive)
    return dim is not None and eqn.params[dim] == 0


def _are_alike(result: _Result, comparisons: Sequence[ChunkComparison]) -> bool:
    """Return whether the terms of a result are computed alike for all chunks."""
    first, *others = result.terms
    return all(
        comparison.are_equal([first], [other])
        for comparison, other in zip(comparisons, others, strict=True)
    )


def _rolled(
    jaxpr: Jaxpr, results: Sequence[_Result], comparisons: Sequence[ChunkComparison]
) -> tuple[Jaxpr, ChunkLoop] | None:
    """Return a step with a loop over its chunks, and the loop.

    Args:
        jaxpr: The step.
        results: The results of all chunks.
        comparisons: The comparisons of the first chunk with each other one.
    """
    sums = [result for result in results if not _is_stack(result.eqn)]
    rows = [result for result in results if _is_stack(result.eqn)]
    terms = [result.terms[0] for result in (*sums, *rows)]
    differing = {var for comparison in comparisons for var in comparison.differing}
    equal = [var for var in comparisons[0].equal if _is_of_all(var, comparisons)]
    eqns = [eqn for _, eqn in needed(enumerate(jaxpr.eqns), terms, differing.union(equal))]
    read = dict.fromkeys(variables([*(atom for eqn in eqns for atom in eqn.invars), *terms]))
    slices = [var for var in read if var in differing]
    computed = {var for eqn in eqns for var in eqn.outvars}.union(slices, jaxpr.constvars)
    consts = [var for var in read if var not in computed]
    values = [[var, *(each.equal.get(var) for each in comparisons)] for var in slices]
    if any(value is None for row in values for value in row):
        return None
    length, source = len(comparisons) + 1, results[0].eqn.source_info
    carries, zeros = ([Var(aval_of(result.terms[0])) for result in sums] for _ in range(2))
    totals = [Var(aval_of(each.terms[0])) if each.others else each.eqn.outvars[0] for each in sums]
    arrays = [stacked_variable(var, length) for var in slices]
    stacked = [
        each.eqn.outvars[0]
        if each.eqn.primitive is stack_p
        else stacked_variable(each.terms[0], length)
        for each in rows
    ]
    body = _body(jaxpr, consts, carries, slices, eqns, terms)
    loop = results[0].eqn.replace(
        invars=[*consts, *zeros, *arrays], outvars=[*totals, *stacked], effects=frozenset()
    )
    before = [
        *loop_equations(lambda *rows: list(map(jnp.stack, rows)), values, arrays, source),
        *zero_equations(zeros, source),
    ]
    after: list[JaxprEqn] = []
    for result, total in zip((*sums, *rows), loop.outvars, strict=True):
        (final,) = result.eqn.outvars
        if result.eqn.primitive is concatenate_p:
            reshape = partial(jnp.reshape, shape=aval_of(final).shape)
            after += equations(reshape, [total], final, source)
        elif result.others:
            after += equations(_sum, [*result.others, total], final, source)
    step = _with_loop(jaxpr, [result.eqn for result in results], [*before, loop, *after])
    chunks = ChunkLoop(loop, body, consts, zeros, arrays, loop.outvars, length, is_reversed=False)
    return step, chunks


def _is_of_all(var: Var, comparisons: Iterable[ChunkComparison]) -> bool:
    """Return whether a value is one and the same for all chunks."""
    return all(comparison.equal.get(var) is var for comparison in comparisons)


def _sum(*values: jax.Array) -> jax.Array:
    return reduce(jnp.add, values)


def _body(
    jaxpr: Jaxpr,
    consts: Sequence[Var],
    carries: Sequence[Var],
    slices: Sequence[Var],
    eqns: Sequence[JaxprEqn],
    terms: Sequence[Var],
) -> Jaxpr:
    """Return the body of a loop over chunks, from the equations of the first chunk.

    Args:
        jaxpr: The step.
        consts: What all iterations read.
        carries: The sums.
        slices: The values of the first chunk that other chunks have others of.
        eqns: The equations.
        terms: What is added to the carries, and then what is stacked.
    """
    names = {var: Var(var.aval) for var in (*slices, *(v for eqn in eqns for v in eqn.outvars))}
    copies = [
        eqn.replace(invars=renamed(eqn.invars, names), outvars=[names[var] for var in eqn.outvars])
        for eqn in eqns
    ]
    ends = renamed(terms, names)
    for k, carry in enumerate(carries):
        after = Var(carry.aval)
        copies += equations(jnp.add, [carry, ends[k]], after, copies[0].source_info)
        ends[k] = after
    return jaxpr.replace(
        invars=[*consts, *carries, *(names[var] for var in slices)],
        outvars=ends,
        eqns=copies,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _with_loop(jaxpr: Jaxpr, replaced: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Return a step with other equations for some of its results."""
    ends = [var for eqn in replaced for var in eqn.outvars]
    numbers = {id(eqn) for eqn in replaced}
    others = [eqn for eqn in jaxpr.eqns if id(eqn) not in numbers]
    late = dependents(enumerate(others), ends)
    step = [eqn for eqn in others if late.isdisjoint(eqn.outvars)]
    step += eqns
    step += [eqn for eqn in others if not late.isdisjoint(eqn.outvars)]
    return jaxpr.replace(eqns=[each for _, each in needed(enumerate(step), jaxpr.outvars)])
