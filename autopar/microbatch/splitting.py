"""Split a step into microbatches without changing what it computes.

The batch scaling of a value (`autopar.microbatch.batch_scaling`) says whether the values of
microbatches are added, averaged or all the same. Division by a statistic of the batch, as in a
masked mean, is deferred until after the last microbatch (`autopar.microbatch.deferred_division`).
Steps that are not separable raise MicrobatchError.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import div_p

from autopar.ir.equation_groups import dependents
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom, Where, aval_of, needed, renamed, source_line, variables
from autopar.ir.step_graph import Combine, Loop, MicrobatchError, Microbatching
from autopar.microbatch.batch_scaling import (
    BatchScalings,
    Repair,
    StatisticRules,
)
from autopar.microbatch.batch_scaling_constants import power_of_constant, with_constants_of
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.microbatch.body_boundary import (
    Boundary,
    find_boundary,
    has_gradient,
    mark_boundary,
    same_boundary,
)
from autopar.microbatch.deferred_division import defer_divisions, equations, statistics
from autopar.microbatch.gradients import accumulate_p
from autopar.microbatch.own_statistics import exact_rules, own_statistic_rules
from autopar.microbatch.row_positions import without_positions
from autopar.microbatch.same_step import check_same_computation
from autopar.microbatch.whole_batch import join_traces


def split(
    micro: Jaxpr,
    whole: Jaxpr,
    sizes: tuple[Jaxpr, Jaxpr],
    batch: frozenset[int],
    count: int,
    part: Jaxpr,
    gradient_free: bool = False,
    stages: bool = False,
    positions: int | None = None,
    own_statistics: bool = False,
    own_loops: bool = False,
    first_pass: bool = False,
    completed: Collection[int] = (),
) -> tuple[Jaxpr, Microbatching]:
    """Split a flat jaxpr into what runs for each microbatch and what runs once.

    Args:
        micro: the step traced for one microbatch.
        whole: the step traced for the whole batch.
        sizes: the same step traced for two batch sizes above one, the second `count` times the
            first. A microbatch of a single example won't do, because tracing simplifies dims of
            size one away.
        batch: inputs whose first dim is the batch, with the positions of the examples.
        count: number of microbatches.
        part: the step for one microbatch, traced as `sizes` are.
        gradient_free: whether the step may take no gradient.
        stages: whether the step is cut into pipeline stages, which run each microbatch only once.
        positions: the input with the positions of the examples
            (`autopar.microbatch.row_positions`); None if the step needs none.
        own_statistics: whether microbatches may use statistics of their own
            (`autopar.microbatch.own_statistics`).
        own_loops: whether each microbatch runs loops until the last of its own examples is done.
        first_pass: whether the step is a first pass (`autopar.microbatch.first_pass`).
        completed: inputs that a first pass completes, and which depend on the batch.

    Returns:
        The jaxpr to run, with the equations after the accumulated values from `whole`, and the
        microbatching, which says which of its equations run when.

    Raises:
        MicrobatchError: the step takes no gradient, or an accumulated value is not separable.
    """
    _check_gradient(micro, gradient_free)
    scaled = _scalings(
        sizes, batch, positions, count, stages, own_statistics, own_loops, first_pass, completed
    )
    found = scaled.found
    if scaled.small is not sizes[0]:
        sizes = scaled.small, sizes[1]
        changed = with_constants_of(whole, micro, count)
        if changed is None:
            raise _single_example(scaled.refused)
        micro = changed
    micro, whole, sizes = _marked(micro, whole, sizes, part, batch, scaled.boundary)
    (_, traced), (_, complete) = _mark(sizes[0]), _mark(whole)
    found.add_marked(*sizes)
    kinds = [found.kinds[var] for var in traced.invars if isinstance(var, Var)]
    micro = _with_dims_of_one(micro, complete, kinds, count)
    number, _ = _mark(micro)
    _, traced_body, _ = _parts(sizes[0], batch)
    repairs = _numbered_repairs(traced_body, found)
    powers: dict[tuple[int, int], int] = {}
    if [eqn.primitive for eqn in micro.eqns] == [eqn.primitive for eqn in sizes[0].eqns]:
        _check_sizes(micro, whole, sizes, count)
        powers = found.powers_of_rows(sizes[0].eqns)
    elif repairs:
        raise _single_example(scaled.refused)
    whole = without_positions(whole)
    _, _, once = _parts(whole, batch)
    _, body, _ = _parts(micro, batch)
    jaxpr, numbers = join_traces(micro, whole, {n for n, _ in body}, {n for n, _ in once})
    combine, weights, divided = _combination(sizes, found)
    if divided:
        repairs[number] = Repair((), divided)
    if found.functions or any(weights):
        jaxpr, later = _divided_afterwards(micro, sizes[0], jaxpr, numbers, found, weights)
        numbers = {number: later[at] for number, at in numbers.items()}
    before: dict[Var, Combine] = {}
    if repairs:
        jaxpr, later, before = _repaired(micro, sizes[0], jaxpr, numbers, repairs, found)
        numbers = {number: later[at] for number, at in numbers.items()}
    powers = {(numbers[n], r): power for (n, r), power in powers.items() if n in numbers}
    chunks, parts = _chunks(micro, sizes[0], found, batch)
    microbatching = microbatching_as_marked(jaxpr, batch, count, combine, before)
    lines = _lines_of_own_statistics(traced_body, found)
    return jaxpr, replace(
        microbatching,
        powers=powers,
        chunks=chunks,
        parts=parts,
        own_statistics=lines,
        own_loops=tuple(found.own_loops),
    )


def microbatching_as_marked(
    jaxpr: Jaxpr,
    batch: frozenset[int],
    count: int,
    combine: Iterable[Combine],
    before: Mapping[Var, Combine] = MappingProxyType({}),
) -> Microbatching:
    """Return what of `jaxpr` runs for each microbatch.

    Args:
        jaxpr: the step as it runs, with its `accumulate` equations.
        batch: inputs whose first dim is the batch.
        count: number of microbatches.
        combine: how accumulated values are combined, without the statistics in `before`.
        before: how statistics that a later loop reads are combined.
    """
    marks, body, tail = _parts(jaxpr, batch)
    loops = _loops(jaxpr, batch, marks, before) if before else [Loop(tuple(body), tuple(marks))]
    others = iter(combine)
    combined: list[Combine] = [
        before[var] if var in before else next(others) for _, eqn in marks for var in eqn.outvars
    ]
    body = sorted({number: eqn for loop in loops for number, eqn in loop.body}.items())
    return Microbatching(
        count, tuple(body), tuple(tail), tuple(marks), tuple(combined), loops=tuple(loops)
    )


def split_once(
    jaxpr: Jaxpr, batch: frozenset[int], gradient_free: bool
) -> tuple[Jaxpr, Microbatching]:
    """Split a flat jaxpr whose only microbatch is the whole batch; see `split`."""
    _check_gradient(jaxpr, gradient_free)
    jaxpr = mark_boundary(jaxpr, find_boundary(jaxpr, batch, None))
    marks, body, tail = _parts(jaxpr, batch)
    if not marks:
        raise _no_batch()
    same: tuple[Combine, ...] = ("same",) * sum(len(eqn.outvars) for _, eqn in marks)
    examples = gcd(*(aval_of(jaxpr.invars[i]).shape[0] for i in batch))
    return jaxpr, Microbatching(1, tuple(body), tuple(tail), tuple(marks), same, chunks=examples)


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


def _scalings(
    sizes: tuple[Jaxpr, Jaxpr],
    batch: frozenset[int],
    positions: int | None,
    count: int,
    stages: bool,
    own_statistics: bool,
    own_loops: bool,
    first_pass: bool,
    completed: Collection[int],
) -> _Scaled:
    """Return the scalings by the first rules with which all accumulated values are separable.

    See `split` for the arguments.

    Raises:
        MicrobatchError: no rules will do, or only those of own statistics, which are not asked for.
    """
    examples = batch - {positions}
    refused: MicrobatchError | None = None
    small, large = sizes

    def separable(small: Jaxpr, attempts: Iterable[StatisticRules]) -> _Scaled | None:
        nonlocal refused
        for rules in attempts:
            found = BatchScalings(small, large, batch, count, rules, own_loops)
            boundary = find_boundary(small, examples, found, first_pass, completed, positions)
            if not boundary.values:
                raise _no_batch()
            reason = found.why_not(boundary.values)
            if reason is None:
                return _Scaled(small, found, boundary, refused)
            if refused is None or rules.own:
                refused = reason
        return None

    changed = with_constants_of(large, small, count) or small
    attempts = list(exact_rules(changed, {*examples, *completed}, stages))
    # What is not separable in a first pass runs once, so its first rules may leave more for that.
    result = separable(changed, attempts[-1:] if first_pass else attempts)
    if result is not None:
        return result
    exact = refused
    assert exact is not None
    if first_pass:
        raise exact
    result = separable(small, own_statistic_rules(*sizes, examples, stages))
    if result is None:
        raise refused if own_statistics and refused else exact
    if not own_statistics:
        raise MicrobatchError(
            f"{exact}; or use batch_statistics='microbatch' in the method, with which each"
            " microbatch has statistics of its own"
        )
    return result


def _single_example(refused: MicrobatchError | None) -> MicrobatchError:
    """Return the error for a step that JAX traces otherwise for a single example."""
    reason = "" if refused is None else f"{refused}. "
    return MicrobatchError(
        f"{reason}The step is computed otherwise when a microbatch has a single example: fewer"
        " microbatches may do"
    )


def _marked(
    micro: Jaxpr,
    whole: Jaxpr,
    sizes: tuple[Jaxpr, Jaxpr],
    part: Jaxpr,
    batch: frozenset[int],
    boundary: Boundary,
) -> tuple[Jaxpr, Jaxpr, tuple[Jaxpr, Jaxpr]]:
    """Return traces of a step with their accumulated values marked; see `split`.

    `boundary` is that of the smaller one of `sizes`.
    """
    small, large = sizes
    micro, whole, large, part = (
        mark_boundary(each, same_boundary(small, boundary, each))
        for each in (micro, whole, large, part)
    )
    small = mark_boundary(small, boundary)
    bodies = [[eqn for _, eqn in _parts(each, batch)[1]] for each in (part, small)]
    check_same_computation((part, small), (bodies[0], bodies[1]), batch)
    return micro, whole, (small, large)


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
    number, mark = _mark(micro)
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
    totals = dict(zip(_mark(micro)[1].outvars, mark.outvars, strict=True))
    rest = [eqn.replace(invars=renamed(eqn.invars, totals)) for eqn in micro.eqns[number + 1 :]]
    eqns = [*micro.eqns[:number], *eqns, mark, *rest]
    return micro.replace(eqns=eqns, outvars=renamed(micro.outvars, totals))


def _no_batch() -> MicrobatchError:
    return MicrobatchError(
        "no result of the step depends on the batch; use num_micro_batches=1 without a pipeline"
    )


def _numbered_repairs(body: Sequence[Numbered], found: BatchScalings) -> dict[int, Repair]:
    """Return the repairs of the equations of a body, by number."""
    return {
        number: found.repairs[eqn.outvars[0]]
        for number, eqn in body
        if eqn.outvars and eqn.outvars[0] in found.repairs
    }


def _lines_of_own_statistics(body: Sequence[Numbered], found: BatchScalings) -> tuple[str, ...]:
    """Return the lines of code where microbatches use statistics of their own, in order."""
    own = (eqn for _, eqn in body if not found.own.keys().isdisjoint(eqn.outvars))
    return tuple(sorted(set(map(source_line, own)), key=_file_and_number))


def _file_and_number(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def _repaired(
    micro: Jaxpr,
    traced: Jaxpr,
    jaxpr: Jaxpr,
    numbers: Mapping[int, int],
    repairs: Mapping[int, Repair],
    found: BatchScalings,
) -> tuple[Jaxpr, list[int], dict[Var, Combine]]:
    """Replace operands as `repairs` says.

    Args:
        micro: the step for one microbatch, with the equations of `traced`.
        traced: the trace that `found` describes.
        jaxpr: the step as it runs.
        numbers: maps the numbers of equations of `micro` to theirs in `jaxpr`.
        repairs: the replacements, by the numbers of equations of `micro`.
        found: the batch scalings of `traced`.

    Returns:
        The new jaxpr, for each equation its number in it, and for each statistic of the whole batch
        how the values of microbatches are combined.
    """
    totals: dict[Var, Var] = {}
    combine: dict[Var, Combine] = {}
    divisors: dict[Var, float] = {}
    for number, repair in repairs.items():
        for k in repair.totals:
            var, known = micro.eqns[number].invars[k], traced.eqns[number].invars[k]
            assert isinstance(var, Var)
            total = totals.setdefault(var, Var(var.aval))
            kind = found.of(known, known)
            combine[total] = _combine(kind)
            if power := _divided_by(kind):
                divisors[var] = found.count**power
    repair_at = {numbers[number]: repair for number, repair in repairs.items()}
    eqns: list[JaxprEqn] = []
    later: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        if number in repair_at:
            operands = list(eqn.invars)
            for k in repair_at[number].totals:
                var = operands[k]
                assert isinstance(var, Var)
                operands[k] = totals[var]
            for k, power in repair_at[number].scaled.items():
                scaled = Var(operands[k].aval)
                eqns += equations(
                    partial(_divided, found.count**power), [operands[k]], scaled, eqn.source_info
                )
                operands[k] = scaled
            eqn = eqn.replace(invars=operands)
        later.append(len(eqns))
        eqns.append(eqn)
        for var in eqn.outvars:
            if var not in totals:
                continue
            operand, total = var, totals[var]
            if var in divisors:
                operand = Var(var.aval)
                by = partial(_divided, divisors[var])
                eqns += equations(by, [var], operand, eqn.source_info)
            eqns.append(
                eqn.replace(primitive=accumulate_p, invars=[operand], outvars=[total], params={})
            )
    return jaxpr.replace(eqns=eqns), later, combine


def _divided(by: float, value: jax.Array) -> jax.Array:
    return (value / by).astype(value.dtype)


def _loops(
    jaxpr: Jaxpr, batch: frozenset[int], marks: Sequence[Numbered], before: Collection[Var]
) -> list[Loop]:
    """Return the loops over the microbatches, in order.

    `before` are the statistics that a later loop reads.
    """
    level: dict[Var, int] = {}
    for eqn in jaxpr.eqns:
        turn = max((level.get(var, 0) for var in variables(eqn.invars)), default=0)
        level.update((var, turn + (var in before)) for var in eqn.outvars)
    early = [(number, eqn) for number, eqn in marks if eqn.outvars and eqn.outvars[0] in before]
    turns = sorted({level[eqn.outvars[0]] for _, eqn in early})
    groups = [[each for each in early if level[each[1].outvars[0]] == turn] for turn in turns]
    groups.append([each for each in marks if each not in early])
    return [Loop(tuple(_parts(jaxpr, batch, group, before)[1]), tuple(group)) for group in groups]


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


def _chunks(
    micro: Jaxpr, traced: Jaxpr, found: BatchScalings, batch: frozenset[int]
) -> tuple[int, int]:
    """Return the number of runs of neighbouring examples in a microbatch, and of its parts.

    `traced` is the trace that `found` describes; its batch may be larger than that of `micro`.
    """
    if not batch:
        return 1, 1
    _, body, _ = _parts(traced, batch)
    _, mark = _mark(traced)
    inputs = [traced.invars[i] for i in batch]
    accumulated = {atom for atom in mark.invars if isinstance(atom, Var)}
    chunks = found.chunks((eqn for _, eqn in body), inputs, accumulated)
    first = min(batch)
    rows, larger = (aval_of(each.invars[first]).shape[0] for each in (micro, traced))
    if chunks * rows % larger:
        raise MicrobatchError(
            f"the step puts {larger // chunks} neighbouring examples together, and a microbatch has"
            f" {rows}; use fewer microbatches"
        )
    chunks = chunks * rows // larger
    parts = found.parts(eqn for _, eqn in body)
    if parts > 1 and rows != larger:
        raise _single_example(None)
    if chunks % parts:
        where = next(Where(eqn) for _, eqn in body if chunks % found.parts([eqn]))
        raise MicrobatchError(
            f"{where} takes one of {parts} equal parts of the batch, as x[: len(x) //"
            f" {parts}] and x.reshape({parts}, -1) do, and a microbatch has {chunks}"
            f" {'examples' if chunks == rows else 'runs of examples'}; use a number of microbatches"
            f" with which {parts} divides that number"
        )
    return chunks, parts


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
    atoms = [_mark(each)[1].invars for each in sizes]
    every = [found.of(atom, twin) for atom, twin in zip(*atoms, strict=True)]
    weights = [kind.per for kind in every]
    late = [atom for atom, kind in zip(atoms[0], every, strict=True) if kind.form == "function"]
    kinds = [kind for kind in every if kind.form != "function"]
    divisors = statistics([*late, *weights], found.functions)
    kinds += [found.of(var, var) for var in divisors]
    scaled = {k: power for k, kind in enumerate(kinds) if (power := _divided_by(kind))}
    combine: list[Combine] = [_combine(kind) for kind in kinds]
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
    ours, theirs = _named(micro, div_p), _named(traced, div_p)
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
    mark, mine = _mark(micro)
    _, other = _mark(traced)
    for a, b in zip(other.invars, mine.invars, strict=True):
        if isinstance(a, Var) and a in found.functions:
            pair(a, b)
    before = {numbers[number] for number in here if number in numbers}
    before.intersection_update(number for number, _ in _parts(jaxpr, frozenset())[1])
    renamed = [None if var is None else own[var] for var in weights]
    return defer_divisions(jaxpr, before, {numbers[mark]: renamed}, functions)


def _other_divisions(divisions: Sequence[Numbered]) -> MicrobatchError:
    where = f" at {source_line(divisions[0][1])}" if divisions else ""
    return MicrobatchError(
        f"a masked mean{where} is computed otherwise when a microbatch has a single example, or a"
        " model runs on shards; use fewer microbatches, or for a scheduled model another backend"
        " than 'manual'"
    )


def _parts(
    jaxpr: Jaxpr,
    batch: frozenset[int],
    ends: Sequence[Numbered] | None = None,
    given: Collection[Var] = (),
) -> tuple[list[Numbered], list[Numbered], list[Numbered]]:
    """Return the marks, and the equations that are needed before and after them.

    An equation with an effect and no result, such as `jax.debug.print`, runs for each microbatch if
    it depends on the batch but not on marked values. Otherwise it runs once, after the marks.

    Args:
        jaxpr: a flat jaxpr with marks, which are its `accumulate` equations.
        batch: inputs whose first dim is the batch.
        ends: the marks that the body computes the operands of; all by default.
        given: values that the body need not compute.
    """
    numbered, marks = list(enumerate(jaxpr.eqns)), _named(jaxpr, accumulate_p)
    accumulated = tuple(var for _, eqn in marks for var in eqn.outvars)
    acts = {number for number, eqn in numbered if eqn.effects and not eqn.outvars}
    repeated: set[int] = set()
    if acts:
        depending = dependents(numbered, (jaxpr.invars[i] for i in batch))
        completed = dependents(numbered, accumulated)
        repeated = {
            n
            for n in acts
            if not depending.isdisjoint(variables(jaxpr.eqns[n].invars))
            and completed.isdisjoint(variables(jaxpr.eqns[n].invars))
        }
    body = [each for each in numbered if each[0] not in acts - repeated]
    tail = [each for each in numbered if each[0] not in repeated]
    wanted = [atom for _, eqn in (marks if ends is None else ends) for atom in eqn.invars]
    return marks, needed(body, wanted, given), needed(tail, jaxpr.outvars, given=accumulated)


def _mark(jaxpr: Jaxpr) -> Numbered:
    """Return the numbered `accumulate` equation of a trace."""
    (mark,) = _named(jaxpr, accumulate_p)
    return mark


def _named(jaxpr: Jaxpr, primitive: Primitive) -> list[Numbered]:
    """Return the numbered equations of one primitive."""
    return [(number, eqn) for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive is primitive]


def _combine(kind: BatchScaling) -> Combine:
    """Return how values of that scaling are combined, after their division (`_divided_by`)."""
    if kind.form == "rows":
        return "rows"
    if kind.power == 1:
        return "sum"
    return "same" if kind.form == "same" else "mean"


def _divided_by(kind: BatchScaling) -> int:
    """Return the power of the number of microbatches by which accumulated values are divided first.

    Rows are, and so is what is neither a sum nor a mean over the examples, such as their mean
    divided by their number.
    """
    if not kind.power or (kind.power == 1 and kind.form != "rows"):
        return 0
    return -kind.power
