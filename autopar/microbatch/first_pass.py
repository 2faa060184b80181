"""The values that a first pass over the microbatches completes, before a second one reads them.

A contrastive loss compares every example with all others, and a balance loss multiplies statistics
of the batch. No microbatch has all examples, and unlike prepared inputs
(`autopar.microbatch.prepared_inputs`) the values depend on the model. So the step runs in two
passes. The first one computes what the values need for each microbatch, such as embeddings, puts it
together, and computes the values once, for the whole batch. In the second pass they are inputs:
values with a row per example, such as the gradients of the embeddings, are cut like the batch. That
is gradient caching (Gao et al. 2021, arXiv:2101.06983): the forward pass runs twice, and the
results are those of the whole batch.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import override

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.array_sizes import value_bytes
from autopar.ir.equation_groups import Unit, dependents, has_backward, units
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom, Where, aval_of, needed_eqns, possible_weights, variables
from autopar.ir.keys import is_key
from autopar.ir.preparation import TracedValue
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_constants import with_constants_of
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.microbatch.body_boundary import find_boundary
from autopar.microbatch.deferred_division import equations
from autopar.microbatch.own_statistics import exact_rules
from autopar.microbatch.pass_options import PassOptions
from autopar.microbatch.prepared_inputs import PreparableValues, computing, values_at
from autopar.microbatch.sized_traces import SizedTraces
from autopar.primitives import record_of

COMPLETED = "first pass"
"""The first words of the path of an input that the first pass completes."""


def more_completed(
    traces: SizedTraces, sizes: tuple[Jaxpr, Jaxpr], options: PassOptions
) -> tuple[TracedValue, ...]:
    """Return values that a first pass may complete, so that more of the step is separable.

    These are the statistics that inseparable equations read. Where equations pair examples, they
    are the first values after them that have a row per example or the shape of a statistic. A first
    pass may compute once what is inseparable, but not the layers of the model: what these read is
    completed in a pass before it.

    Args:
        traces: the traces of the step.
        sizes: `traces.small` and `traces.large` with further inputs: values that are computed
            before, and the positions of the examples.
        options: the options of the pass, whose inputs are those of `sizes`.

    Returns:
        The values; empty if no such values help.
    """
    if not traces.have_same_primitives:
        return ()
    batch, count = options.batch, options.count
    small = with_constants_of(sizes[1], sizes[0], count) or sizes[0]
    *_, rules = exact_rules(small, {*options.examples, *options.completed}, options.stages)
    try:
        found = BatchScalings(small, sizes[1], batch, count, rules, options.own_loops)
        boundary = find_boundary(small, found, replace(options, is_first_pass=False))
    except MicrobatchError:
        return ()
    inseparable = [var for var in boundary.values if isinstance(found.kinds[var], NotSeparable)]
    if options.is_first_pass and not inseparable:
        tail = find_boundary(small, found, options).tail
        eqns = (each for each in enumerate(small.eqns) if not tail.isdisjoint(each[1].outvars))
        layers = model_layers(eqns, (small, sizes[1]), batch)
        inseparable = [var for eqn in layers for var in eqn.outvars]
    search = _CompletableValues(traces, small, batch, found)
    return search.places_before(inseparable)


def latest_completed(
    traces: SizedTraces,
    small: Jaxpr,
    batch: Collection[int],
    inputs: Sequence[int],
    completed: Sequence[TracedValue],
) -> tuple[TracedValue, ...]:
    """Return the values that a first pass completes, with what follows from them alone.

    An update of the weights or of the optimizer's state runs once, not for each microbatch.

    Args:
        traces: the traces of the step.
        small: the second pass of `traces.small`, with further inputs.
        batch: inputs of `small` whose first dim is the batch.
        inputs: inputs of `small` that the first pass completes.
        completed: their places in the traces.
    """
    known = dict(zip((small.invars[i] for i in inputs), completed, strict=True))
    for number, eqn in enumerate(traces.small.eqns):
        for result, var in enumerate(eqn.outvars):
            known[var] = TracedValue(number, result)
    groups = units(enumerate(small.eqns))
    rest = dependents(enumerate(small.eqns), (small.invars[i] for i in batch))
    derived = {small.invars[i] for i in inputs} - rest
    update: set[int] = set()
    for unit in groups:
        if derived.isdisjoint(unit.reads):
            continue
        fits = all(_has_fixed_shape(traces, known.get(var)) for var in unit.makes)
        if fits and rest.isdisjoint(unit.reads):
            derived.update(unit.makes)
            update.add(unit.number)
        else:
            rest.update(unit.makes)
    read = {var for unit in groups if unit.number not in update for var in unit.reads}
    read.update(variables(small.outvars))
    read &= derived.union(small.invars[i] for i in inputs)
    return tuple(value for var, value in known.items() if var in read)


def finished_with(
    completed: Sequence[TracedValue],
    traces: SizedTraces,
    second: Jaxpr,
    inputs: Collection[int],
    batch: Collection[int],
    found: BatchScalings,
) -> tuple[TracedValue, ...]:
    """Return values that the second pass would compute by the layers that the first pass has, too.

    The loss of a discriminator is one, if a generator learns from the updated discriminator: all
    that it needs is computed for the gradient of the discriminator.

    Args:
        completed: the values that the first pass completes.
        traces: the traces of the step.
        second: the second pass of `traces.small`, with `completed` as inputs.
        inputs: the numbers of these inputs.
        batch: inputs of `second` whose first dim is the batch.
        found: the scalings of the values of `second`.
    """
    computed = results_of(computing(traces.small, completed).eqns)
    eqns = list(enumerate(second.eqns))
    layers = results_of(eqn for eqn in second.eqns if record_of(eqn).is_costly)
    own = dependents(eqns, (layers - computed) | {second.invars[i] for i in inputs})
    search = _CompletableValues(traces, second, batch, found)
    return search.places_before_layers(dependents(eqns, layers & computed) - own, own)


def results_of(eqns: Iterable[JaxprEqn]) -> set[Var]:
    """Return the values that equations compute."""
    return {var for eqn in eqns for var in eqn.outvars}


def _has_fixed_shape(traces: SizedTraces, place: TracedValue | None) -> bool:
    """Return whether a value is an array of the same shape for any size of the batch."""
    if place is None:
        return False
    avals = [aval_of(*values_at(trace, [place])) for trace in traces]
    return not is_key(avals[0].dtype) and len({aval.shape for aval in avals}) == 1


class _CompletableValues(PreparableValues):
    """The values of a step that a first pass can complete; see `more_completed`."""

    @cached_property
    def _depending(self) -> set[Var]:
        """The values that depend on the examples."""
        eqns = (each for unit in self.units for each in unit.eqns)
        return dependents(eqns, (self.invars[i] for i in self.examples))

    def places_before(self, values: Iterable[Var]) -> tuple[TracedValue, ...]:
        """Return the places of values without which `values` are not separable."""
        roots = self._roots(values)
        statistics = dict.fromkeys(
            statistic for unit in roots for var in unit.reads for statistic in self._statistics(var)
        )
        chosen, only_first = (list(statistics), set()) if statistics else self._after(roots)
        chosen += (var for var in self.rounded_with(chosen) if var not in only_first)
        places = [self.as_input(var) for var in chosen]
        return tuple(place for place in places if place) if all(places) else ()

    def places_before_layers(self, values: Set[Var], later: Set[Var]) -> tuple[TracedValue, ...]:
        """Return the places of values that are results, or that an equation of `later` reads.

        Of values with a row per example, these are the ones that an equation of a forward pass
        reads and that are no larger than the batch.
        """
        candidates = self._depending.intersection(values)
        chosen = candidates.intersection(variables(self.outvars))
        for unit in self.units:
            if not later.isdisjoint(unit.makes):
                for var in candidates.intersection(unit.reads):
                    is_small = not has_backward(unit) and value_bytes(var) <= self._batch_bytes
                    if is_small or self._statistics(var) == [var]:
                        chosen.add(var)
        places = (self.as_input(var) for var in self.place if var in chosen)
        return tuple(place for place in places if place)

    @property
    def _batch_bytes(self) -> int:
        return sum(value_bytes(self.invars[i]) for i in self.examples)

    def _statistics(self, var: Var) -> list[Var]:
        """Return a value itself if it is a statistic, or the one by which it is divided."""
        kind = self.kinds[var]
        if not isinstance(kind, BatchScaling):
            return []
        if kind.per is not None:
            return [kind.per]
        return [var] if kind.form in ("linear", "function") else []

    @override
    def as_input(self, var: Var) -> TracedValue | None:
        """Return the place of a value as an input, which may have several blocks of rows."""
        place, dims = super().as_input(var), self.growing_dims(var)
        if place is not None or dims is None:
            return place
        (dim,) = dims
        blocks = {
            shape[dim] / min(rows)
            for shape, rows in zip(self._shapes(var), self.num_rows, strict=True)
        }
        if len(blocks) > 1 or not (count := min(blocks)).is_integer():
            return None
        return self.place[var]._replace(blocks=int(count), dim=dim)

    def _roots(self, values: Iterable[Var]) -> list[Unit]:
        """Return the first units with inseparable results, or with rows for a part of the batch.

        Their operands are separable and have rows for the whole batch.
        """
        roots: dict[int, Unit] = {}
        pending, seen = list(values), set[Var]()
        while pending:
            var = pending.pop()
            if var in seen or var not in self.unit_of:
                continue
            seen.add(var)
            unit = self.unit_of[var]
            reasons = [var for var in unit.reads if not _is_joinable(self.kinds[var])]
            if reasons:
                pending += reasons
            else:
                roots[unit.number] = unit
        # What follows from no example, such as a mask of pairs, can be computed again.
        of_batch = self._depending & {var for unit in roots.values() for var in unit.makes}
        found = [roots[number] for number in sorted(roots)]
        return [unit for unit in found if not of_batch.isdisjoint(unit.makes)] or found

    def _after(self, roots: Sequence[Unit]) -> tuple[list[Var], Set[Var]]:
        """Return the first values after `roots` that others can read from a first pass.

        Values before these that only the first pass reads are the second result.

        Between them and the roots are the equations that only the first pass computes: those that
        read a value of an unfit shape, and those on the way from one of these to another.
        """
        inside = {unit.number for unit in roots}
        while True:
            made = {var for unit in self.units if unit.number in inside for var in unit.makes}
            unfit = {var for var in made if not self.fits(var)}
            more = {unit.number for unit in self.units if not unfit.isdisjoint(unit.reads)}
            more |= self._between(inside, made)
            if more <= inside:
                break
            inside |= more
        read = {
            var for unit in self.units if unit.number not in inside for var in unit.reads
        }.union(variables(self.outvars))
        first_pass = (unit for unit in self.units if unit.number in inside)
        return [var for unit in first_pass for var in unit.makes if var in read], unfit

    def _between(self, inside: Collection[int], made: Collection[Var]) -> set[int]:
        """Return the units that depend on `made`, and that a unit of `inside` depends on."""
        later = dependents((each for unit in self.units for each in unit.eqns), made)
        wanted: set[Var] = set()
        between: set[int] = set()
        for unit in reversed(self.units):
            if unit.number in inside or not wanted.isdisjoint(unit.makes):
                wanted.update(unit.reads)
                if not later.isdisjoint(unit.reads):
                    between.add(unit.number)
        return between


def _is_joinable(kind: BatchScaling | NotSeparable) -> bool:
    """Return whether the values of all microbatches can be joined to the value of the batch.

    Rows for a part of the batch can't be.
    """
    return isinstance(kind, BatchScaling) and not isinstance(kind.blocks, Fraction)


def reading(jaxpr: Jaxpr, inputs: Collection[int] = ()) -> Jaxpr:
    """Return a pass without the equations that neither its results nor effects need.

    Args:
        jaxpr: the trace of a step with further inputs.
        inputs: the inputs that a first pass completes. Copies of them are returned, because they
            are where the equations read them.
    """
    eqns = needed_eqns(jaxpr.eqns, jaxpr.outvars)
    completed = {jaxpr.invars[i] for i in inputs}
    outvars: list[Atom] = []
    for atom in jaxpr.outvars:
        if isinstance(atom, Var) and atom in completed:
            copy = Var(aval_of(atom))
            eqns += equations(jnp.copy, [atom], copy, jaxpr.eqns[0].source_info)
            atom = copy
        outvars.append(atom)
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def check_no_model(
    tail: Iterable[Numbered], micro: Jaxpr, whole: Jaxpr, batch: Collection[int]
) -> None:
    """Check that what a first pass computes once for the whole batch has no layers of the model.

    Args:
        tail: the equations that it computes once.
        micro: the trace of the pass for one microbatch.
        whole: the trace for the whole batch, with the same primitives.
        batch: inputs whose first dim is the batch.

    Raises:
        MicrobatchError: a product of values of the batch has a weight as its other operand.
    """
    # What both traces have alike is in the tail as the microbatch has it.
    for eqn in model_layers(tail, (micro, whole), batch):
        raise MicrobatchError(
            f"{Where(eqn)} is a layer of the model and needs examples of all microbatches"
        )


def model_layers(
    eqns: Iterable[Numbered], traces: tuple[Jaxpr, Jaxpr], batch: Collection[int]
) -> Iterator[JaxprEqn]:
    """Yield the layers among `eqns`: products of values of the batch with weights.

    Args:
        eqns: equations of either of the traces.
        traces: a step for two sizes of the batch, with the same primitives.
        batch: inputs whose first dim is the batch.
    """
    of_batch: set[Var] = set()
    weights: set[Var] = set()
    for trace in traces:
        of_batch |= dependents(enumerate(trace.eqns), (trace.invars[i] for i in batch))
        weights.update(possible_weights(trace, batch))
    for eqn, twin in zip(traces[0].eqns, traces[1].eqns, strict=True):
        if not weights.isdisjoint(variables((*eqn.invars, *twin.invars))):
            for pair in zip(eqn.outvars, twin.outvars, strict=True):
                if aval_of(pair[0]).shape == aval_of(pair[1]).shape:
                    weights.update(pair)
    for _, eqn in eqns:
        operands = variables(eqn.invars)
        mixed = not of_batch.isdisjoint(operands) and not weights.isdisjoint(operands)
        if mixed and record_of(eqn).is_costly:
            yield eqn
