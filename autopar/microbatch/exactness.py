"""Whether microbatches compute what the whole batch does: the record in the plan, and warnings.

Microbatches may differ from the whole batch only where the user allows it, by `rng="fold_in"` or
`batch_statistics="microbatch"`, and may run loops otherwise by `while_loops="microbatch"`. This
module reports which of the three a traced step needs. `created_rows`, `own_statistics` and
`batch_scaling` implement them.
"""

from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn

from autopar.ir.array_sizes import value_bytes
from autopar.ir.equation_groups import dependents, units
from autopar.ir.graph import is_backward, listed, possible_weights, source_line
from autopar.ir.step_graph import Exactness, FirstPass, StepGraph
from autopar.microbatch.created_rows import folds_position
from autopar.primitives import record_of


def exactness_of(step: StepGraph) -> Exactness:
    """Return what the microbatches of a step compute exactly.

    A step that gives the same numbers without a choice counts as exact.
    """
    own = step.microbatching.own_statistics if step.microbatching else ()
    return Exactness(
        rng="fold_in" if any(map(folds_position, step.jaxpr.eqns)) else "exact",
        batch_statistics="microbatch" if own else "exact",
        while_loops="microbatch" if _own_loops(step) else "exact",
    )


def exactness_warnings(step: StepGraph) -> list[str]:
    """Return a warning for each difference between microbatches and the whole batch.

    Additional work or memory has a warning, too: what is computed before the step, another pass
    over the model, layers that run for the whole batch after its microbatches, and gradients that
    are not computed in microbatches at all.
    """
    exactness = exactness_of(step)
    warnings = []
    if lines := _gradients_of_whole_batch(step):
        warnings.append(
            "the microbatches compute no gradients, because all of them depend on more than one"
            f" microbatch: they are computed for the whole batch at once, at {lines[0]}"
        )
    elif layers := _layers_of_whole_batch(step):
        num_bytes = sum(value_bytes(var) for eqn in layers for var in eqn.outvars)
        named = listed([*dict.fromkeys(map(source_line, layers))])
        warnings.append(
            "layers of the model run for the whole batch at once after its microbatches, because"
            f" they read what these complete, such as new weights: {named}; their results have"
            f" {num_bytes:,} bytes. A step of its own that evaluates new weights can have"
            " microbatches, too"
        )
    prepared = step.preparation.jaxpr.eqns if step.preparation else ()
    if step.preparation and not all(record_of(eqn).is_view for eqn in prepared):
        warnings.append(
            "computed for the whole batch before the step, and not in its predicted time: "
            + listed(step.preparation.lines)
        )
    if step.first_pass is not None:
        warnings.append(_passes_warning(list(_first_passes(step))))
    if exactness.rng == "fold_in":
        warnings.append(
            "rng='fold_in': each microbatch draws random bits from a key of its own, so they are"
            " not those of the step without microbatches"
        )
    if exactness.batch_statistics == "microbatch":
        assert step.microbatching is not None
        named = listed(step.microbatching.own_statistics)
        warnings.append(
            f"batch_statistics='microbatch': each microbatch uses statistics of its own at {named}"
            ", so the results are not those of the step without microbatches; what is"
            " computed from these statistics afterwards, as running averages, has their mean"
        )
    if exactness.while_loops == "microbatch":
        named = listed(_own_loops(step))
        warnings.append(
            "while_loops='microbatch': each microbatch runs a loop until the last of its own"
            f" examples is done at {named}; the results equal those of the step without"
            " microbatches if further iterations do not change a finished example"
        )
    return warnings


def _passes_warning(passes: Sequence[FirstPass]) -> str:
    """Return the warning about the passes over the microbatches before the last one."""
    lines = listed([*dict.fromkeys(line for each in passes for line in each.lines)])
    num_passes = 1 + sum(map(_computes_layers, passes))
    if num_passes == 1:
        return f"a pass before the model's completes values of the whole batch: {lines}"
    return (
        f"{num_passes} passes over the microbatches compute the model, because a later one needs"
        f" what an earlier one completes for the whole batch: {lines}"
    )


def _computes_layers(first: FirstPass) -> bool:
    """Return whether the microbatches of a pass have products, as layers of a model do."""
    found = first.step.microbatching
    return found is not None and any(record_of(eqn).is_contraction for _, eqn in found.body)


def _gradients_of_whole_batch(step: StepGraph) -> list[str]:
    """Return the lines whose gradients are taken after the microbatches, if none are in them."""
    found = step.microbatching
    if found is None or any(is_backward(eqn) for _, eqn in found.body):
        return []
    return [source_line(eqn) for _, eqn in found.tail if is_backward(eqn)]


def _layers_of_whole_batch(step: StepGraph) -> list[JaxprEqn]:
    """Return the products of weights and examples that are computed after all microbatches.

    A loss of updated weights has some, and so has a line search.
    """
    found = step.microbatching
    if found is None or found.count == 1:
        return []
    totals = [var for _, eqn in found.marks for var in eqn.outvars]
    rows = {var for var, how in zip(totals, found.combine, strict=True) if how == "rows"}
    of_batch = dependents(found.tail, rows)
    sources = {*totals, *possible_weights(step.jaxpr, step.batch)} - rows
    weights = dependents(found.tail, sources) - of_batch
    return [
        eqn
        for unit in units(found.tail)
        if not (of_batch.isdisjoint(unit.reads) or weights.isdisjoint(unit.reads))
        for _, eqn in unit.eqns
        if record_of(eqn).is_contraction
    ]


def _own_loops(step: StepGraph) -> list[str]:
    """Return the lines of the loops that each microbatch runs for its own examples."""
    steps = step, *(first.step for first in _first_passes(step))
    splits = (each.microbatching for each in steps if each.microbatching)
    return list(dict.fromkeys(line for split in splits for line in split.own_loops))


def _first_passes(step: StepGraph) -> Iterator[FirstPass]:
    """Yield the first pass of a step, the first pass of that pass, and so on."""
    first = step.first_pass
    while first is not None:
        yield first
        first = first.step.first_pass
