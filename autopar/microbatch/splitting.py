"""Split a step into microbatches without changing what it computes.

The batch scaling of a value (`autopar.microbatch.batch_scaling`) says whether the values of
microbatches are added, averaged or all the same. Division by a statistic of the batch, as in a
masked mean, is deferred until after the last microbatch (`autopar.microbatch.deferred_division`).
Steps that are not separable raise MicrobatchError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import div_p

from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom, aval_of, renamed, rewired, source_line
from autopar.ir.step_graph import Combine, MicrobatchError, Microbatching
from autopar.microbatch.batch_rows import num_examples
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_constants import power_of_constant, with_constants_of
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.microbatch.batch_statistics import Repair, StatisticRules
from autopar.microbatch.body_boundary import (
    Boundary,
    find_boundary,
    has_gradient,
    mark_boundary,
    same_boundary,
)
from autopar.microbatch.deferred_division import defer_divisions, equations, statistics
from autopar.microbatch.example_runs import example_runs, single_example_error
from autopar.microbatch.marked_steps import (
    mark_of,
    microbatching_as_marked,
    named_equations,
    step_parts,
)
from autopar.microbatch.operand_repairs import numbered_repairs, with_repairs
from autopar.microbatch.own_statistics import exact_rules, own_statistic_rules
from autopar.microbatch.pass_options import PassOptions
from autopar.microbatch.row_positions import without_positions
from autopar.microbatch.same_step import check_same_computation
from autopar.microbatch.whole_batch import join_traces


def split(
    micro: Jaxpr, whole: Jaxpr, part: Jaxpr, sizes: tuple[Jaxpr, Jaxpr], options: PassOptions
) -> tuple[Jaxpr, Microbatching]:
    """Split a flat jaxpr into what runs for each microbatch and what runs once.

    Args:
        micro: the step traced for one microbatch.
        whole: the step traced for the whole batch.
        part: the step for one microbatch, traced as `sizes` are.
        sizes: the same step traced for two batch sizes above one, of which the second has
            `options.count` times the examples of the first. A microbatch of a single example won't
            do, because tracing simplifies dims of size one away.
        options: the options of the pass.

    Returns:
        The jaxpr to run, with the equations after the accumulated values from `whole`, and the
        microbatching, which says which of its equations run when.

    Raises:
        MicrobatchError: the step takes no gradient, or an accumulated value is not separable.
    """
    batch, count = options.batch, options.count
    _check_gradient(micro, options.gradient_free)
    scaled = _scalings(sizes, options)
    found = scaled.found
    if scaled.small is not sizes[0]:
        sizes = scaled.small, sizes[1]
        changed = with_constants_of(whole, micro, count)
        if changed is None:
            raise single_example_error(scaled.refused)
        micro = changed
    micro, whole, sizes = _marked(micro, whole, part, sizes, batch, scaled.boundary)
    (_, traced), (_, complete) = mark_of(sizes[0]), mark_of(whole)
    found.add_marked(*sizes)
    kinds = [found.kinds[var] for var in traced.invars if isinstance(var, Var)]
    micro = _with_dims_of_one(micro, complete, kinds, count)
    number, _ = mark_of(micro)
    traced_body = step_parts(sizes[0], batch).body
    repairs = numbered_repairs(traced_body, found)
    powers: dict[tuple[int, int], int] = {}
    if [eqn.primitive for eqn in micro.eqns] == [eqn.primitive for eqn in sizes[0].eqns]:
        _check_sizes(micro, whole, sizes, count)
        powers = found.powers_of_rows(sizes[0].eqns)
    elif repairs:
        raise single_example_error(scaled.refused)
    whole = without_positions(whole)
    once, body = step_parts(whole, batch).tail, step_parts(micro, batch).body
    jaxpr, numbers = join_traces(micro, whole, {n for n, _ in body}, {n for n, _ in once})
    combine, weights, divided = _combination(sizes, found)
    if divided:
        repairs[number] = Repair((), divided)
    if found.functions or any(weights):
        jaxpr, later = _divided_afterwards(micro, sizes[0], jaxpr, numbers, found, weights)
        numbers = {number: later[at] for number, at in numbers.items()}
    before: dict[Var, Combine] = {}
    if repairs:
        jaxpr, later, before = with_repairs(micro, sizes[0], jaxpr, numbers, repairs, found)
        numbers = {number: later[at] for number, at in numbers.items()}
    chunks, parts = example_runs(micro, sizes[0], found, batch)
    return jaxpr, replace(
        microbatching_as_marked(jaxpr, batch, count, combine, before),
        powers={(numbers[n], r): power for (n, r), power in powers.items() if n in numbers},
        chunks=chunks,
        parts=parts,
        own_statistics=_lines_of_own_statistics(traced_body, found),
        own_loops=tuple(found.own_loops),
    )


def split_once(
    jaxpr: Jaxpr, batch: frozenset[int], gradient_free: bool
) -> tuple[Jaxpr, Microbatching]:
    """Split a flat jaxpr whose only microbatch is the whole batch; see `split`."""
    _check_gradient(jaxpr, gradient_free)
    jaxpr = mark_boundary(jaxpr, find_boundary(jaxpr, None, PassOptions(1, batch)))
    parts = step_parts(jaxpr, batch)
    if not parts.marks:
        raise _no_batch()
    same: tuple[Combine, ...] = ("same",) * sum(len(eqn.outvars) for _, eqn in parts.marks)
    examples = num_examples(jaxpr, batch)
    return jaxpr, Microbatching(1, *parts, same, chunks=examples)


def _check_gradient(jaxpr: Jaxpr, gradient_free: bool) -> None:
    if not gradient_free and not has_gradient(jaxpr):
        raise MicrobatchError(
            "the step takes no gradient, so there are no stages of a backward pass; use"
            " ShardParallel, or autopar.FollowParallel for an evaluation"
        )


class _Scaled(NamedTuple):
    """The batch scalings of a step with which it runs in microbatches.

    Attributes:
        small: the smaller trace, with constants of the larger one where it needs them.
        found: the scalings.
        boundary: the values that are accumulated.
        refused: why a value is not separable without changes of equations; None if all are.
    """

    small: Jaxpr
    found: BatchScalings
    boundary: Boundary
    refused: MicrobatchError | None


def _scalings(sizes: tuple[Jaxpr, Jaxpr], options: PassOptions) -> _Scaled:
    """Return the scalings by the first rules with which all accumulated values are separable.

    See `split` for the arguments.

    Raises:
        MicrobatchError: no rules will do, or only those of own statistics, which are not asked for.
    """
    examples = options.examples
    refused: MicrobatchError | None = None
    small, large = sizes

    def separable(small: Jaxpr, attempts: Iterable[StatisticRules]) -> _Scaled | None:
        nonlocal refused
        for rules in attempts:
            found = BatchScalings(
                small, large, options.batch, options.count, rules, options.own_loops
            )
            boundary = find_boundary(small, found, options)
            if not boundary.values:
                raise _no_batch()
            reason = found.why_not(boundary.values)
            if reason is None:
                return _Scaled(small, found, boundary, refused)
            if refused is None or rules.own:
                refused = reason
        return None

    changed = with_constants_of(large, small, options.count) or small
    attempts = list(exact_rules(changed, {*examples, *options.completed}, options.stages))
    # What is not separable in a first pass runs once, so its first rules may leave more for that.
    result = separable(changed, attempts[-1:] if options.is_first_pass else attempts)
    if result is not None:
        return result
    exact = refused
    assert exact is not None
    if options.is_first_pass:
        raise exact
    result = separable(small, own_statistic_rules(*sizes, examples, options.stages))
    if result is None:
        raise refused if options.own_statistics and refused else exact
    if not options.own_statistics:
        raise MicrobatchError(
            f"{exact}; or use batch_statistics='microbatch' in the method, with which each"
            " microbatch has statistics of its own"
        )
    return result


def _marked(
    micro: Jaxpr,
    whole: Jaxpr,
    part: Jaxpr,
    sizes: tuple[Jaxpr, Jaxpr],
    batch: frozenset[int],
    boundary: Boundary,
) -> tuple[Jaxpr, Jaxpr, tuple[Jaxpr, Jaxpr]]:
    """Return traces of a step with their accumulated values marked; see `split`.

    `boundary` is that of the smaller one of `sizes`.
    """
    small, large = sizes
    marked = {small: mark_boundary(small, boundary)}
    for trace in (micro, whole, large, part):
        if trace not in marked:
            marked[trace] = mark_boundary(trace, same_boundary(small, boundary, trace, batch))
    if part is not small:
        bodies = [
            [eqn for _, eqn in step_parts(marked[trace], batch).body] for trace in (part, small)
        ]
        check_same_computation((marked[part], marked[small]), (bodies[0], bodies[1]), batch)
    return marked[micro], marked[whole], (marked[small], marked[large])


def _with_dims_of_one(
    micro: Jaxpr,
    complete: JaxprEqn,
    kinds: Sequence[BatchScaling | NotSeparable],
    count: int,
) -> Jaxpr:
    """Return a step whose accumulated values have the dims of those of the whole batch.

    A microbatch of one example may lack its dim of examples: `jnp.take_along_axis` drops dims of
    size one.

    Args:
        micro: the step for one microbatch, marked.
        complete: the `accumulate` equation of the whole batch.
        kinds: the scalings of the accumulated values.
        count: number of microbatches.
    """
    number, mark = mark_of(micro)
    eqns: list[JaxprEqn] = []
    values: list[Atom] = []
    for atom, total, kind in zip(mark.invars, complete.outvars, kinds, strict=True):
        aval, shape = aval_of(atom), list(aval_of(total).shape)
        if len(aval.shape) != len(shape) and isinstance(kind, BatchScaling) and kind.form == "rows":
            shape[kind.dim] //= count
            value = Var(aval.update(shape=tuple(shape)))
            eqns += equations(partial(jnp.reshape, shape=shape), [atom], value, mark.source_info)
            atom = value
        values.append(atom)
    if not eqns:
        return micro
    mark = mark.replace(invars=values, outvars=[Var(aval_of(value)) for value in values])
    totals = dict(zip(mark_of(micro)[1].outvars, mark.outvars, strict=True))
    rest = [rewired(eqn, totals) for eqn in micro.eqns[number + 1 :]]
    eqns = [*micro.eqns[:number], *eqns, mark, *rest]
    return micro.replace(eqns=eqns, outvars=renamed(micro.outvars, totals))


def _no_batch() -> MicrobatchError:
    return MicrobatchError(
        "no result of the step depends on the batch; use num_micro_batches=1 without a pipeline"
    )


def _lines_of_own_statistics(body: Sequence[Numbered], found: BatchScalings) -> tuple[str, ...]:
    """Return the lines of code where microbatches use statistics of their own, in order."""
    own = (eqn for _, eqn in body if not found.own.keys().isdisjoint(eqn.outvars))
    return tuple(sorted(set(map(source_line, own)), key=_file_and_number))


def _file_and_number(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def _check_sizes(micro: Jaxpr, whole: Jaxpr, sizes: tuple[Jaxpr, Jaxpr], count: int) -> None:
    """Raise MicrobatchError if constants of `micro` and `whole` scale otherwise than `sizes`."""
    traces = (micro, whole, *sizes)
    if micro is sizes[0] or len({len(each.eqns) for each in traces}) > 1:
        return
    for eqns in zip(*(each.eqns for each in traces), strict=True):
        for atoms in zip(*(eqn.invars for eqn in eqns), strict=True):
            values = [atom.val for atom in atoms if isinstance(atom, Literal)]
            if len(values) == len(traces):
                small, large, smaller, larger = values
                if power_of_constant(small, large, count) != power_of_constant(
                    smaller, larger, count
                ):
                    raise MicrobatchError(
                        f"a constant at {source_line(eqns[0])} is {small} for a microbatch and"
                        f" {large} for the batch, and depends otherwise on the sizes of larger"
                        " ones; use fewer microbatches"
                    )


def _combination(
    sizes: tuple[Jaxpr, Jaxpr], found: BatchScalings
) -> tuple[list[Combine], list[Var | None], dict[int, int]]:
    """Return how to combine the accumulated values of microbatches.

    Args:
        sizes: the marked traces that `found` describes.
        found: their batch scalings.

    Returns:
        How the operands of the `accumulate` equation are combined that are no functions of
        statistics, and after them the statistics; the divisor of each operand, or None; and the
        powers of the number of microbatches by which operands are divided, by position.
    """
    atoms = [mark_of(each)[1].invars for each in sizes]
    every = [found.of(atom, twin) for atom, twin in zip(*atoms, strict=True)]
    weights = [kind.per for kind in every]
    late = [atom for atom, kind in zip(atoms[0], every, strict=True) if kind.form == "function"]
    kinds = [kind for kind in every if kind.form != "function"]
    divisors = statistics([*late, *weights], found.functions)
    kinds += [found.of(var, var) for var in divisors]
    scaled = {k: power for k, kind in enumerate(kinds) if (power := kind.divisor_power)}
    combine: list[Combine] = [kind.combine for kind in kinds]
    return combine, weights, scaled


def _divided_afterwards(
    micro: Jaxpr,
    traced: Jaxpr,
    jaxpr: Jaxpr,
    numbers: Mapping[int, int],
    found: BatchScalings,
    weights: Sequence[Var | None],
) -> tuple[Jaxpr, list[int]]:
    """Defer the divisions of `micro` that correspond to those that `found` has in another trace.

    Both traces have the same divisions, but a single example may need fewer other equations.

    Args:
        micro: the step for one microbatch.
        traced: the trace that `found` and `weights` describe.
        jaxpr: the step as it runs.
        numbers: maps the numbers of equations of `micro` to theirs in `jaxpr`.
        found: the batch scalings of `traced`.
        weights: the divisor of each operand of the `accumulate` equation, or None.
    """
    ours, theirs = named_equations(micro, div_p), named_equations(traced, div_p)
    scalars = [[not aval_of(eqn.invars[1]).shape for _, eqn in each] for each in (ours, theirs)]
    maker = {eqn.outvars[0]: eqn for eqn in micro.eqns if len(eqn.outvars) == 1}
    own: dict[Var, Var] = {}
    functions: dict[Var, JaxprEqn] = {}

    def pair(other: Atom, mine: Atom) -> None:
        """Map a statistic or a function of statistics to its variable in `micro`."""
        if not isinstance(other, Var) or other in own:
            return
        if not isinstance(mine, Var):
            raise _other_divisions(theirs)
        own[other] = mine
        if other in found.functions:
            function, functions[mine] = found.functions[other], maker[mine]
            if function.primitive is not maker[mine].primitive:
                raise _other_divisions(theirs)
            for a, b in zip(function.invars, maker[mine].invars, strict=True):
                pair(a, b)

    if scalars[0] != scalars[1]:
        raise _other_divisions(theirs)
    here = set()
    for (number, mine), (_, other) in zip(ours, theirs, strict=True):
        if other.outvars[0] in found.divided:
            pair(other.invars[1], mine.invars[1])
            here.add(number)
    mark, mine = mark_of(micro)
    _, other = mark_of(traced)
    for a, b in zip(other.invars, mine.invars, strict=True):
        if isinstance(a, Var) and a in found.functions:
            pair(a, b)
    before = {numbers[number] for number in here if number in numbers}
    before.intersection_update(number for number, _ in step_parts(jaxpr, frozenset()).body)
    renamed = [None if var is None else own[var] for var in weights]
    return defer_divisions(jaxpr, before, {numbers[mark]: renamed}, functions)


def _other_divisions(divisions: Sequence[Numbered]) -> MicrobatchError:
    where = f" at {source_line(divisions[0][1])}" if divisions else ""
    return MicrobatchError(
        f"a masked mean{where} is computed otherwise when a microbatch has a single example, or a"
        " model runs on shards; use fewer microbatches, or for a scheduled model another backend"
        " than 'manual'"
    )
