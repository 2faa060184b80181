"""Layers that depend on no example, which run once per step.

A model may compute values from its weights alone: the embeddings of all items of a recommender, the
texts of all classes, the kernel of a long convolution. A pipeline computes these values before the
first microbatch, as what a first pass completes (`autopar.microbatch.first_pass`). Their gradients
are linear in cotangents, so these are summed over the microbatches, and the backward pass of the
layers runs after the last one.

Sums of cotangents are kept for all microbatches. Where they are larger than the gradients of the
weights, as those of a product of two thin matrices, or have fewer digits, the backward pass of a
layer is left to the microbatches.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from jax.extend.core import Jaxpr, Var

from autopar.ir.array_sizes import value_bytes
from autopar.ir.equation_groups import Unit, dependents, has_backward, units
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import aval_of, needed, variables
from autopar.ir.step_graph import Microbatching
from autopar.microbatch.batch_scaling_rules import BatchScaling, NotSeparable
from autopar.primitives import record_of


def batch_free_gradients(
    jaxpr: Jaxpr,
    groups: Sequence[Unit],
    depending: set[Var],
    kinds: Mapping[Var, BatchScaling | NotSeparable],
) -> set[int]:
    """Return the numbers of the units of a backward pass that may run after the last microbatch.

    They read sums over the examples and no rows. They are costly, add the gradient of a costly
    regularizer, or follow from such units.

    Args:
        jaxpr: a flat jaxpr.
        groups: its units.
        depending: the values that depend on the batch.
        kinds: the batch scalings of all values.
    """

    def is_of_sums(unit: Unit) -> bool:
        sums = depending.intersection(unit.reads)
        scalings = [kinds[var] for var in (*sums, *unit.makes)]
        return bool(sums) and all(
            isinstance(kind, BatchScaling) and kind.form in ("linear", "same") for kind in scalings
        )

    backward = [unit for unit in groups if has_backward(unit)]
    of_weights = [var for unit in filter(_is_costly, backward) for var in unit.makes]
    eqns = (each for unit in groups for each in unit.eqns)
    regularizing = dependents(eqns, set(of_weights) - depending) - depending
    late: set[Var] = set()
    chosen: list[Unit] = []
    for unit in filter(is_of_sums, backward):
        if _is_costly(unit) or not (late | regularizing).isdisjoint(unit.reads):
            late.update(unit.makes)
            chosen.append(unit)
    return {
        unit.number
        for part in _connected(chosen, depending)
        if _sums_fit(part, _read_outside(part, jaxpr, groups), depending)
        for unit in part
    }


def _is_costly(unit: Unit) -> bool:
    return any(record_of(eqn).is_costly for _, eqn in unit.eqns)


def _connected(chosen: Iterable[Unit], depending: set[Var]) -> list[list[Unit]]:
    """Return units in parts that have no values of the batch in common."""
    parts: list[tuple[set[Var], list[Unit]]] = []
    for unit in chosen:
        values, members = depending.intersection((*unit.reads, *unit.makes)), [unit]
        others: list[tuple[set[Var], list[Unit]]] = []
        for part in parts:
            if values.isdisjoint(part[0]):
                others.append(part)
            else:
                values, members = values | part[0], [*part[1], *members]
        parts = [*others, (values, members)]
    return [members for _, members in parts]


def _read_outside(part: Sequence[Unit], jaxpr: Jaxpr, groups: Iterable[Unit]) -> set[Var]:
    """Return the values that units compute and others read."""
    numbers = {unit.number for unit in part}
    read = {var for unit in groups if unit.number not in numbers for var in unit.reads}
    return read.union(variables(jaxpr.outvars)).intersection(
        var for unit in part for var in unit.makes
    )


def _sums_fit(part: Sequence[Unit], results: Iterable[Var], depending: Set[Var]) -> bool:
    """Return whether sums that units read are no larger than what else they read and compute.

    Sums of a narrower type than the results would lose digits.

    Args:
        part: the units.
        results: the values that they compute for others.
        depending: the values that depend on the batch, as the sums do.
    """
    results = set(results)
    made = {var for unit in part for var in unit.makes}
    read = {var for unit in part for var in unit.reads} - made
    sums = read & depending
    fits = _bytes_of(sums) <= _bytes_of(results | (read - depending))
    return fits and min(map(_itemsize, sums)) >= max(map(_itemsize, results), default=0)


def _itemsize(value: Var) -> int:
    return aval_of(value).dtype.itemsize


def _bytes_of(values: Iterable[Var]) -> int:
    return sum(map(value_bytes, values))


def batch_free_values(jaxpr: Jaxpr, micro: Microbatching, batch: Collection[int]) -> list[Var]:
    """Return the values that layers without examples compute in each microbatch of a step.

    They are no larger than the weights of their layers, or each microbatch would keep them for its
    backward pass. Products that the tail reads for gradients of the layers are among them.

    Args:
        jaxpr: the step as it runs.
        micro: its microbatches.
        batch: inputs whose first dim is the batch, with the positions of the examples.
    """
    depending = dependents(micro.body, (var for i, var in enumerate(jaxpr.invars) if i in batch))
    # In the body a loop has what the body needs, and what the tail needs, too, in the step.
    numbers = {unit.number for unit in units(micro.body)}
    groups = [unit for unit in units(enumerate(jaxpr.eqns)) if unit.number in numbers]
    free = [unit for unit in groups if depending.isdisjoint(unit.makes)]
    readers = [unit for unit in groups if not depending.isdisjoint(unit.makes)]
    eqns = [each for unit in free for each in unit.eqns]
    layers = {unit.number: unit for unit in free if _is_costly(unit)}
    computed = dependents(eqns, (var for unit in layers.values() for var in unit.makes))
    kept = {var for unit in filter(has_backward, readers) for var in unit.reads}
    read = {var for unit in readers for var in unit.reads}
    read.update(atom for _, mark in micro.marks for atom in variables(mark.invars))
    values: list[Var] = []
    chosen: dict[int, Unit] = {}
    for value in (var for unit in free for var in unit.makes if var in computed & read):
        own = {number: layers[number] for number, _ in needed(eqns, [value]) if number in layers}
        if value in kept or value_bytes(value) <= _bytes_of(_weights(jaxpr, eqns, own.values())):
            values.append(value)
            chosen |= own
    totals = (var for _, mark in micro.marks for var in mark.outvars)
    again = needed(micro.tail, jaxpr.outvars, {*values, *totals})
    inside = {number for unit in chosen.values() for number, _ in unit.eqns}
    late = {var for n, eqn in again if n not in inside for var in variables(eqn.invars)}
    return values + [var for unit in chosen.values() for var in unit.makes if var in late]


def _weights(jaxpr: Jaxpr, eqns: Iterable[Numbered], layers: Iterable[Unit]) -> Set[Var]:
    """Return the inputs of a step that layers depend on."""
    results = (var for unit in layers for var in unit.makes)
    read = (var for _, eqn in needed(eqns, results) for var in variables(eqn.invars))
    return set(jaxpr.invars).intersection(read)
