"""Whether traces of a step for batches of different sizes compute the same.

What a step does may depend on the shapes of its arguments. Two traces compute the same if their
equations apply the same primitives to the same values.
"""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.extend.core.primitives import reduce_sum_p

from autopar.ir.graph import Source, aval_of, is_called_by, source_line, sources, sources_of
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling_rules import ONE_GRADIENT
from autopar.microbatch.created_rows import created_by
from autopar.microbatch.inner_bodies import why_body_differs
from autopar.primitives import record_of


class DifferentStepsError(MicrobatchError):
    """What a step computes depends on the size of its batch."""


def check_same_step(jaxpr: Jaxpr, larger: Jaxpr) -> None:
    """Check that two traces compute the same.

    One may compute rows from the positions of examples where the other creates the whole array.

    Args:
        jaxpr: flat jaxpr of the step.
        larger: flat jaxpr of the step for a larger batch.

    Raises:
        DifferentStepsError: they have other primitives, or apply them to other values.
    """
    both = zip(jaxpr.eqns, larger.eqns, strict=False)
    for eqn, other in both:
        if created_by(eqn) is not created_by(other):
            raise _different(f"{eqn.primitive.name} and {other.primitive.name}", eqn)
    if len(jaxpr.eqns) != len(larger.eqns):
        raise _different("more or less")
    known, others = (sources(trace, trace.eqns) for trace in (jaxpr, larger))
    for eqn, other in zip(jaxpr.eqns, larger.eqns, strict=True):
        if eqn.primitive is not other.primitive:
            continue
        if sources_of(eqn.invars, known) != sources_of(other.invars, others):
            raise _different(f"{eqn.primitive.name} of other values", eqn)
    if sources_of(jaxpr.outvars, known) != sources_of(larger.outvars, others):
        raise _different("other results")


def check_same_computation(
    traces: tuple[Jaxpr, Jaxpr],
    eqns: tuple[Sequence[JaxprEqn], Sequence[JaxprEqn]],
    batch: frozenset[int],
) -> None:
    """Check that equations of two traces compute the same, one of which may be of one example.

    Tracing adds or omits sums and changes of shape for dims of size one, so these do not count.

    Args:
        traces: flat jaxprs of the step, the second one for a larger batch.
        eqns: equations of both, in order.
        batch: inputs whose first dim is the batch.

    Raises:
        DifferentStepsError: they have other primitives, or apply them to other values.
    """
    computing = [[eqn for eqn in each if not _only_reshapes(eqn)] for each in eqns]
    forms = [_forms(*each) for each in zip(traces, eqns, computing, strict=True)]
    first = next(
        (
            n
            for n, (form, other) in enumerate(zip(*forms, strict=False))
            if form != other or why_body_differs(computing[0][n], computing[1][n])
        ),
        None if len(forms[0]) == len(forms[1]) else min(map(len, forms)) - 1,
    )
    if first is None:
        return
    rows, more = (aval_of(trace.invars[min(batch)]).shape[0] for trace in traces)
    raise DifferentStepsError(
        f"the step computes something else for a microbatch of {rows} than for {more} examples at"
        f" {source_line(computing[1][first])}; make it compute the same for batches of any size, or"
        " use another num_micro_batches"
    )


def _forms(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], computing: Sequence[JaxprEqn]
) -> list[tuple[Primitive, list[Source]]]:
    """Return the primitives of the equations `computing` among `eqns`, and what they read."""
    known = sources(jaxpr, computing)
    for eqn in filter(_only_reshapes, eqns):
        known.update(dict.fromkeys(eqn.outvars, *sources_of(eqn.invars[:1], known)))
    return [(eqn.primitive, sources_of(eqn.invars, known)) for eqn in computing]


def _only_reshapes(eqn: JaxprEqn) -> bool:
    return record_of(eqn).movement == "shape" or eqn.primitive is reduce_sum_p


def _different(what: str, eqn: JaxprEqn | None = None) -> DifferentStepsError:
    """Return the error for a step that depends on the size of the batch."""
    where = f" at {source_line(eqn)}" if eqn else ""
    if eqn is not None and is_called_by(eqn, "associative_scan"):
        return DifferentStepsError(
            f"an associative scan over the batch{where} takes more steps for more examples, which"
            " can't run in microbatches. The gradients of jax.lax.cumlogsumexp, cumprod, cummax and"
            " cummin have one: write them by jnp.cumsum, as jnp.log(jnp.cumsum(jnp.exp(x))), or use"
            " num_micro_batches=1"
        )
    return DifferentStepsError(
        f"the step does different things for batches of different size{where}: {what}; that can't"
        " run in microbatches. Make it compute the same for batches of any size, or use"
        f" num_micro_batches=1. {ONE_GRADIENT}"
    )
