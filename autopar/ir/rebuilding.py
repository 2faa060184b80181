"""A traced step with equations inserted, replaced or dropped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom
from autopar.ir.step_graph import Loop, MicrobatchError, Microbatching, StepGraph


@dataclass(frozen=True, slots=True)
class Placed:
    """An equation of the rewritten step.

    Attributes:
        at: the number of the equation of the step that it is, or that it is inserted beside.
        eqn: the equation.
        origin: the number of the equation of the step that it is or repeats; None for a new one.
    """

    at: int
    eqn: JaxprEqn
    origin: int | None = None


def rebuilt(
    step: StepGraph,
    eqns: Sequence[Placed],
    outvars: Sequence[Atom],
    invars: Sequence[Var] | None = None,
) -> StepGraph:
    """Return a step with other equations, which run where those run that they are placed at.

    Args:
        step: the step.
        eqns: the equations in order.
        outvars: the outputs.
        invars: the inputs; by default the inputs of `step`.
    """
    jaxpr = Jaxpr(
        constvars=step.jaxpr.constvars,
        invars=step.jaxpr.invars if invars is None else invars,
        outvars=outvars,
        eqns=[placed.eqn for placed in eqns],
        consts=step.jaxpr.consts,
        debug_info=step.jaxpr.debug_info.with_unknown_names(),
    )
    return replace(step, jaxpr=jaxpr, microbatching=_microbatching(step.microbatching, eqns))


def _microbatching(micro: Microbatching | None, eqns: Sequence[Placed]) -> Microbatching | None:
    """Return how the rewritten step runs in microbatches."""
    if micro is None:
        return None
    placed_at: dict[int, list[Numbered]] = {}
    powers: dict[tuple[int, int], int] = {}
    for number, placed in enumerate(eqns):
        placed_at.setdefault(placed.at, []).append((number, placed.eqn))
        for result in range(len(placed.eqn.outvars)):
            origin = -1 if placed.origin is None else placed.origin
            if (origin, result) in micro.powers:
                powers[number, result] = micro.powers[origin, result]

    def numbered(before: Iterable[Numbered]) -> tuple[Numbered, ...]:
        return tuple(placed for number, _ in before for placed in placed_at.get(number, ()))

    return replace(
        micro,
        body=numbered(micro.body),
        tail=numbered(micro.tail),
        marks=numbered(micro.marks),
        powers=powers,
        loops=tuple(Loop(numbered(loop.body), numbered(loop.marks)) for loop in micro.loops),
    )


def retraced_alike(
    rewritten: StepGraph, step: StepGraph, rewrite: Callable[[StepGraph], StepGraph]
) -> StepGraph:
    """Return a rewritten step whose traces for other numbers of microbatches are rewritten, too.

    Args:
        rewritten: the rewritten step.
        step: the step before.
        rewrite: the rewriting.
    """
    primitives = [eqn.primitive for eqn in rewritten.jaxpr.eqns]

    def retrace(count: int) -> StepGraph:
        parts = rewrite(step.retrace(count))
        if [eqn.primitive for eqn in parts.jaxpr.eqns] != primitives:
            raise MicrobatchError(
                f"microbatches of {step.name} that are split into {count} would not compute the"
                " same values again"
            )
        return parts

    return replace(rewritten, retrace=retrace)
