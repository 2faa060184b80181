"""What the options of equations, and their seconds, depend on: equal equations share one object.

Layers repeat, and a step is enumerated on many meshes. Results are memoized by these objects, which
compare by identity: their contents are compared once per step instead of at each look-up.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jax.extend.core import JaxprEqn

from autopar.ir.graph import Atom, aval_of
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.primitives import kernel_name
from autopar.sharding.dataflow import analyze
from autopar.sharding.loop_sums import summed_iterations
from autopar.xla_fusion import traffic


class Content:
    """Stands for equal contents; compared by identity."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EquationContents:
    """The contents of each equation of a step.

    Attributes:
        options: what the options of an equation depend on beside its operands: its factors, those
            over the batch, and the sizes of its results.
        seconds: what the seconds of these options depend on, too: the kernel, its memory traffic,
            and how its results are completed.
    """

    options: tuple[Content | None, ...]
    seconds: tuple[Content | None, ...]


@memoized_on_step
def equation_contents(
    step: StepGraph, row_padding: float, completes_behind_loops: bool
) -> EquationContents:
    """Return the contents of each equation of `step`; None for equations without factors.

    Args:
        step: the step.
        row_padding: `MeshCosts.row_padding`.
        completes_behind_loops: `MeshCosts.completes_behind_loops`.

    Raises:
        MissingRuleError: an equation has no sharding rule.
    """
    flow = analyze(step)
    moved = traffic(step, row_padding).moved
    sums = loop_sums(step, completes_behind_loops)
    options: list[Content | None] = []
    seconds: list[Content | None] = []
    for number, (eqn, factors) in enumerate(zip(step.jaxpr.eqns, flow.factors, strict=True)):
        if factors is None:
            options.append(None)
            seconds.append(None)
            continue
        options.append(_content(factors, result_sizes(eqn), flow.batch_factors[number]))
        seconds.append(
            _content(
                kernel_name(eqn),
                str(eqn.params) if factors.decides else "",
                factors,
                tuple(atom.aval for atom in (*eqn.invars, *eqn.outvars)),
                moved[number],
                flow.is_combined(eqn.outvars[0]),
                sums.get(eqn.outvars[0]),
            )
        )
    return EquationContents(tuple(options), tuple(seconds))


# An object that is dropped is made again, and what it was the key of is computed again.
@lru_cache(maxsize=1 << 16)
def _content(*_parts: Hashable) -> Content:
    """Return one object for equal parts."""
    return Content()


@memoized_on_step
def loop_sums(step: StepGraph, completes_behind_loops: bool) -> Mapping[Atom, float]:
    """Return the iterations of the loop of each sum that is completed behind its loop."""
    if not completes_behind_loops:
        return {}
    return summed_iterations(step.jaxpr.eqns, step.jaxpr.outvars)


def result_sizes(eqn: JaxprEqn) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the shape and the bytes per element of each result."""
    return tuple((tuple(aval_of(var).shape), aval_of(var).dtype.itemsize) for var in eqn.outvars)
