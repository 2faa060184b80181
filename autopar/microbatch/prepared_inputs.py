"""Values that a step computes from the whole batch before its first microbatch.

A step may mix examples before its model sees them: it adds a rolled or permuted batch (mixup),
standardizes advantages by their mean and deviation, or divides by a sum of weights. No microbatch
has what that needs. But such values depend on the inputs alone, so they are computed once for the
whole batch, and the microbatches take them as further inputs: values with a row per example are cut
like the batch, others are the same for all. This changes where a value is computed and never what
it is, so the results stay those of the whole batch.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from fractions import Fraction
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import random_bits_p, random_split_p

from autopar.ir.equation_groups import Unit, dependents, has_backward, pure, units
from autopar.ir.graph import (
    aval_of,
    needed,
    possible_weights,
    renamed,
    rewired,
    source_line,
    variables,
)
from autopar.ir.keys import is_key
from autopar.ir.preparation import Preparation, TracedValue
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.microbatch.created_rows import is_exact_by_row
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.example_blocks import blocks_apart, blocks_merged
from autopar.microbatch.sized_traces import SizedTraces
from autopar.primitives import record_of
from autopar.primitives.linearity import algebra_of, is_exact

PREPARED = "prepared input"
"""The first words of the path of an input that is computed from the whole batch."""


def preparation(whole: Jaxpr, places: Sequence[TracedValue]) -> Preparation:
    """Return the equations that compute the values at `places`.

    Args:
        whole: flat jaxpr of the step for the whole batch.
        places: the values.
    """
    jaxpr = computing(whole, places)
    read = set(variables(atom for eqn in jaxpr.eqns for atom in eqn.invars))
    lines = dict.fromkeys(source_line(whole.eqns[place.number]) for place in places)
    reads = tuple(i for i, var in enumerate(whole.invars) if var in read)
    return Preparation(jaxpr, tuple(places), tuple(lines), reads)


def computing(trace: Jaxpr, places: Sequence[TracedValue]) -> Jaxpr:
    """Return what computes values as they are inputs of the microbatches, without effects.

    Args:
        trace: the trace of a step.
        places: the places of the values in it.
    """
    values = values_at(trace, places)
    eqns = [eqn for _, eqn in needed(pure(enumerate(trace.eqns)), values)]
    results: list[Var] = []
    for place, value in zip(places, values, strict=True):
        results.append(value)
        if place.blocks > 1 or place.dim:
            moved = partial(examples_first, place)
            shape = jax.eval_shape(moved, aval_of(value)).shape
            results[-1] = Var(aval_of(value).update(shape=shape))
            source = trace.eqns[place.number].source_info
            eqns += equations(moved, [value], results[-1], source)
    return trace.replace(eqns=eqns, outvars=results, effects=frozenset())


def with_prepared(jaxpr: Jaxpr, places: Sequence[TracedValue]) -> Jaxpr:
    """Return a trace that takes the values at `places` as its last inputs."""
    new = {value: Var(value.aval) for value in values_at(jaxpr, places)}
    inputs: list[Var] = []
    first: list[JaxprEqn] = []
    for place, value in zip(places, new.values(), strict=True):
        if place.blocks == 1 and place.dim == 0:
            inputs.append(value)
            continue
        aval = jax.eval_shape(partial(examples_first, place), aval_of(value))
        inputs.append(Var(aval_of(value).update(shape=aval.shape)))
        source = jaxpr.eqns[place.number].source_info
        first += equations(partial(_as_traced, place), inputs[-1:], value, source)

    eqns = [*first, *(rewired(eqn, new) for eqn in jaxpr.eqns)]
    outvars = renamed(jaxpr.outvars, new)
    return jaxpr.replace(invars=[*jaxpr.invars, *inputs], eqns=eqns, outvars=outvars)


def examples_first(place: TracedValue, value: jax.Array) -> jax.Array:
    """Return a value as it is an input of the microbatches."""
    if place.blocks > 1:
        value = blocks_apart(place.dim, place.blocks, value)
    return jnp.moveaxis(value, place.dim, 0)


def _as_traced(place: TracedValue, value: jax.Array) -> jax.Array:
    """Return the value that `examples_first` gives another shape."""
    value = jnp.moveaxis(value, 0, place.dim)
    return blocks_merged(place.dim, value) if place.blocks > 1 else value


def prepared_rows(micro: Jaxpr, whole: Jaxpr, places: Sequence[TracedValue]) -> frozenset[int]:
    """Return which of the inputs of `with_prepared` have a row per example.

    A microbatch of a single example does not show it: the others may have a dim of size one, too.

    Args:
        micro: the trace of the step for one microbatch, without the inputs.
        whole: the trace for the whole batch.
        places: the values that become inputs.
    """
    first = len(micro.invars)
    return frozenset(
        first + k
        for k, place in enumerate(places)
        if aval_of(_value(micro, place)).shape != aval_of(_value(whole, place)).shape
    )


def more_prepared(
    traces: SizedTraces, small: Jaxpr, batch: frozenset[int], found: BatchScalings
) -> tuple[TracedValue, ...]:
    """Return values that a step may compute before its microbatches, which else refuse it.

    Args:
        traces: the traces of the step.
        small: `traces.small` with further inputs: values that are prepared, and the positions of
            the examples.
        batch: inputs of `small` whose first dim is the batch.
        found: the scalings of its values.

    Returns:
        The values that are not separable; if there are none, those that follow from groups of
        examples that are larger than a microbatch; if there are none, the statistics of the batch.
        Empty if nothing can be prepared.
    """
    if not traces.have_same_primitives:
        return ()
    search = PreparableValues(traces, small, batch, found)
    chosen = search.inseparable() or search.of_large_groups() or search.statistics()
    return search.places([*chosen, *filter(search.is_preparable, search.rounded_with(chosen))])


class PreparableValues:
    """The values of a step that can be prepared; see `more_prepared` for the arguments."""

    def __init__(
        self, traces: SizedTraces, small: Jaxpr, batch: Collection[int], found: BatchScalings
    ) -> None:
        self.invars, self.outvars = small.invars, small.outvars
        self.traces = traces
        self.kinds = found.kinds
        self.examples = [i for i in batch if i < len(traces.small.invars)]
        self.units = units(enumerate(small.eqns))
        self.unit_of = {var: unit for unit in self.units for var in unit.makes}
        self.place = {
            var: TracedValue(n, r)
            for n, eqn in enumerate(traces.small.eqns)
            for r, var in enumerate(eqn.outvars)
        }
        self._candidates = _of_inputs_alone(traces.small, self.examples, self._takes_rows)

    def places(self, values: Iterable[Var]) -> tuple[TracedValue, ...]:
        """Return the places of values in all traces."""
        return tuple(self.as_input(var) or self.place[var] for var in values)

    def inseparable(self) -> list[Var]:
        """Return the values that are not separable, where what can't be prepared reads them."""
        bad = {var for var in self._candidates if isinstance(self.kinds[var], NotSeparable)}

        def choice(var: Var) -> list[Var] | None:
            if self.fits(var):
                return [var]
            sources = [choice(other) for other in self.unit_of[var].reads if other in bad]
            chosen = [source for source in sources if source is not None]
            if chosen and len(chosen) == len(sources):
                return [other for source in chosen for other in source]
            return [var] if self._has_several_rows(var) else None

        values: dict[Var, None] = {}
        for var in self._read_by_model(lambda var: isinstance(self.kinds[var], NotSeparable)):
            if var in bad:
                chosen = choice(var)
                if chosen is None:
                    return []
                values.update(dict.fromkeys(chosen))
        return list(values)

    def of_large_groups(self) -> list[Var]:
        """Return the first values after those with a row for a group that no microbatch has whole.

        Rewards are standardized among the answers to a question, for example.
        """
        rows, larger = (
            aval_of(trace.invars[min(self.examples)]).shape[0]
            for trace in (self.traces.micro, self.traces.small)
        )
        groups = {var for var in self._candidates if self._num_runs(var, larger) * rows % larger}
        eqns = (each for unit in self.units for each in unit.eqns)
        needed_by_results = units(needed(eqns, self.outvars))
        readers = [unit for unit in needed_by_results if not groups.isdisjoint(unit.reads)]
        values = [var for unit in readers for var in unit.makes if var not in groups]
        return values if all(map(self.is_preparable, values)) else []

    def _num_runs(self, var: Var, num_rows: int) -> int:
        """Return the number of runs of examples that have a row of a value, or all examples."""
        kind = self.kinds[var]
        if not isinstance(kind, BatchScaling) or kind.form != "rows":
            return num_rows
        is_whole = isinstance(kind.blocks, int)
        return aval_of(var).shape[kind.dim] // kind.blocks if is_whole else num_rows

    def statistics(self) -> list[Var]:
        """Return the sums, means and functions of them that the model or its loss reads."""

        def is_statistic(var: Var) -> bool:
            kind = self.kinds[var]
            return isinstance(kind, BatchScaling) and kind.form in ("linear", "function")

        read = self._read_by_model(lambda var: True)
        return [var for var in read if is_statistic(var) and self.fits(var)]

    def _read_by_model(self, condition: Callable[[Var], bool]) -> list[Var]:
        """Return the candidates that others read, if these compute a value that meets it."""
        readers = (
            unit
            for unit in self.units
            if self._candidates.isdisjoint(unit.makes) and any(map(condition, unit.makes))
        )
        read = (var for unit in readers for var in unit.reads if var in self._candidates)
        return list(dict.fromkeys(read))

    def rounded_with(self, chosen: Collection[Var]) -> list[Var]:
        """Return the values of examples that have to be rounded as they are for `chosen`.

        The example with the largest value of the batch is the one that equals it, or differs from
        it by zero. Where its value is computed a second time, it may be rounded otherwise.
        """
        values = dict.fromkeys((*self._compared_with(chosen), *self._picked_from(chosen)))
        return [var for var in values if var in self.place]

    def _compared_with(self, chosen: Collection[Var]) -> list[Var]:
        """Return the values of examples that are compared with what depends on `chosen`."""
        eqns = [each for unit in self.units for each in unit.eqns]
        later = dependents(eqns, chosen)
        found: dict[Var, None] = {}
        for _, eqn in eqns:
            operands = variables(eqn.invars)
            if algebra_of(eqn) == "invariant" and not later.isdisjoint(operands):
                found |= {var: None for var in operands if var not in later}
        return list(filter(self._is_of_examples, found))

    def _picked_from(self, chosen: Collection[Var]) -> list[Var]:
        """Return the values of examples whose extremes, quantiles or elements are `chosen`."""
        found: dict[Var, None] = {}
        pending, seen = list(chosen), set[int]()
        while pending:
            unit = self.unit_of.get(pending.pop())
            if unit is None or unit.number in seen or not all(map(_keeps_elements, _eqns(unit))):
                continue
            seen.add(unit.number)
            rows = list(filter(self._is_of_examples, unit.reads))
            pending += (var for var in unit.reads if var not in rows)
            if self._picks(unit):
                found |= dict.fromkeys((*rows, *map(self._computed_from, rows)))
        return [var for var in found if self.fits(var) and not is_exact(var)]

    def _picks(self, unit: Unit) -> bool:
        """Return whether a unit sorts the examples, or picks as many elements of any batch."""
        records = [record_of(eqn) for eqn in _eqns(unit)]
        if any(record.fusion == "elementwise" for record in records):
            return False
        sorts = any(record.algebra == "homogeneous" for record in records)
        return sorts or all(len(set(self._shapes(var))) == 1 for var in unit.makes)

    def _computed_from(self, var: Var) -> Var:
        """Return the value of examples from which `var` is computed element by element."""
        while (unit := self.unit_of.get(var)) and all(map(_keeps_elements, _eqns(unit))):
            rows = list(filter(self._is_of_examples, unit.reads))
            if len(rows) != 1:
                break
            (var,) = rows
        return var

    def _is_of_examples(self, var: Var) -> bool:
        kind = self.kinds[var]
        return isinstance(kind, BatchScaling) and kind.form == "rows"

    def is_preparable(self, var: Var) -> bool:
        """Return whether a value can be computed before the microbatches."""
        return var in self._candidates and self.fits(var)

    def fits(self, var: Var) -> bool:
        """Return whether a value can be an input; see `as_input`."""
        return self.as_input(var) is not None

    def as_input(self, var: Var) -> TracedValue | None:
        """Return the place of a value as an input; None for what can't be one.

        It has a row per example in one of its dims, or one shape for any batch, and no keys.
        """
        dims = self.growing_dims(var)
        if dims is None:
            return None
        if not dims:
            return self.place[var]
        (dim,) = dims
        fits = [{shape[dim]} for shape in self._shapes(var)] == self.num_rows
        return self.place[var]._replace(dim=dim) if fits else None

    def growing_dims(self, var: Var) -> list[int] | None:
        """Return the dim that grows with the batch, if any; None for what can't be an input."""
        shapes = self._shapes(var)
        if not shapes or is_key(aval_of(var).dtype) or len(set(map(len, shapes))) > 1:
            return None
        dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
        return dims if len(dims) < 2 else None

    @cached_property
    def num_rows(self) -> list[set[int]]:
        """The numbers of rows of the batch in each trace, which differ among its arrays."""
        return [{aval_of(trace.invars[i]).shape[0] for i in self.examples} for trace in self.traces]

    def _takes_rows(self, unit: Unit) -> bool:
        """Return whether a unit takes as many rows of a state as there are examples.

        A state has such rows if it is a queue of keys, or of former examples.
        """
        others = {var for i, var in enumerate(self.invars) if i not in self.examples}
        is_argument = others.issuperset(unit.reads[:1])
        is_part = all(record_of(eqn).reads_part for eqn in _eqns(unit))
        return is_argument and is_part and all(map(self.growing_dims, unit.makes))

    def _has_several_rows(self, var: Var) -> bool:
        """Return whether a value has neighbouring rows of each example in its first dim, no keys.

        Where this is not known, the step may be refused with the value as an input.
        """
        shapes = self._shapes(var)
        if is_key(aval_of(var).dtype) or len({shape[1:] for shape in shapes}) != 1:
            return False
        pending, seen = [var], {var}
        while pending:
            for other in self.unit_of[pending.pop()].reads:
                kind = self.kinds[other]
                if other in seen or aval_of(other).shape[:1] != aval_of(var).shape[:1]:
                    continue
                seen.add(other)
                if isinstance(kind, NotSeparable):
                    pending += [other] if other in self.unit_of else []
                elif kind.blocks not in (1, None):
                    return False
        counts = {
            Fraction(shape[0], aval_of(trace.invars[i]).shape[0])
            for trace, shape in zip(self.traces, shapes, strict=True)
            for i in self.examples
        }
        return len(counts) == 1 and counts.pop().denominator == 1

    def _shapes(self, var: Var) -> list[tuple[int, ...]]:
        """Return the shape of a value in each trace; empty if it is in none of them."""
        place = self.place.get(var)
        return [aval_of(_value(trace, place)).shape for trace in self.traces] if place else []


def _of_inputs_alone(
    jaxpr: Jaxpr, examples: Collection[int], takes_rows: Callable[[Unit], bool]
) -> Set[Var]:
    """Return the cheap values that depend neither on the model nor on a gradient of examples.

    Every array of floating-point numbers that is not of the batch may be the model's, unless the
    step takes as many rows of it as there are examples. Products of matrices and loops over what is
    in the batch are no preparation. Nor are random bits that a generator draws for all examples
    together: the masks of all dropouts would be inputs.

    Args:
        jaxpr: flat jaxpr of a step.
        examples: inputs whose first dim is the batch, without the positions of the examples.
        takes_rows: whether a unit takes as many rows of a state as there are examples.
    """
    numbered = list(enumerate(jaxpr.eqns))
    groups = units(numbered)
    of_batch = dependents(numbered, (jaxpr.invars[i] for i in examples))
    sources = possible_weights(jaxpr, examples)
    for unit in groups:
        eqns = _eqns(unit)
        reads_batch = not of_batch.isdisjoint(unit.reads)
        is_excluded = has_backward(unit) or any(map(_is_costly, eqns))
        if (reads_batch and is_excluded) or any(map(_draws_together, eqns)):
            sources += unit.makes
    excluded = dependents(numbered, sources)
    others = (
        each
        for unit in groups
        if not (takes_rows(unit) and (excluded | of_batch).isdisjoint(unit.reads[1:]))
        for each in unit.eqns
    )
    excluded = dependents(others, sources)
    return {var for unit in groups if excluded.isdisjoint(unit.makes) for var in unit.makes}


def _eqns(unit: Unit) -> list[JaxprEqn]:
    return [eqn for _, eqn in unit.eqns]


def _keeps_elements(eqn: JaxprEqn) -> bool:
    """Return whether a result is made of single elements of each operand, not of their sums."""
    record = record_of(eqn)
    return (
        record.fusion == "elementwise"
        or record.movement is not None
        or record.algebra == "homogeneous"
    )


def _is_costly(eqn: JaxprEqn) -> bool:
    return record_of(eqn).is_costly or bool(eqn.effects)


def _draws_together(eqn: JaxprEqn) -> bool:
    return eqn.primitive in (random_bits_p, random_split_p) and not is_exact_by_row(eqn)


def values_at(jaxpr: Jaxpr, places: Iterable[TracedValue]) -> list[Var]:
    """Return the values at `places` of a trace."""
    return [_value(jaxpr, place) for place in places]


def _value(jaxpr: Jaxpr, place: TracedValue) -> Var:
    return jaxpr.eqns[place.number].outvars[place.result]
