"""The planner's candidates in words, for reports and errors."""

from collections.abc import Collection
from difflib import get_close_matches

from autopar.analysis.replay import completions
from autopar.ir.spec import Spec, axes_of, partition_spec
from autopar.plan_stages import spec_text
from autopar.primitives.factors import PARTIAL, Assignment, OpFactors


def describe(
    factors: OpFactors, assignment: Assignment, result: Spec, batch: Collection[int] = ()
) -> str:
    """Return what a candidate splits over which mesh axes, and how it completes partial results.

    An example is `x on contracted (operand 0 dim 1, operand 1 dim 0), then all_reduce over x`.

    Args:
        factors: how the equation maps array dims.
        assignment: for each factor the mesh axes that split it.
        result: the spec of the first result.
        batch: the factors that run over the batch.
    """
    parts = [
        f"{'+'.join(axes)} on {_dims_text(factors, f, f in batch)}"
        for f, axes in enumerate(assignment)
        if axes
    ]
    text = ", ".join(parts) or "whole on every device"
    for kind, axis in completions(factors, assignment, result):
        text += f", then {kind} over {axis}"
        if kind == "reduce_scatter":
            text += f" onto dim {next(d for d, axes in enumerate(result) if axis in axes)}"
    return text


def describe_spec(spec: Spec) -> str:
    """Return a spec as source text, `P(None, 'x')`; a replicated one as `whole P(None, None)`."""
    text = spec_text(partition_spec(spec))
    return text if axes_of(spec) else f"whole {text}"


def nearest(name: str, names: Collection[str]) -> str:
    """Return up to three of the names that resemble `name`, for an error."""
    names = [other for other in names if other]
    containing = [other for other in names if name in other]
    return " or ".join((containing or get_close_matches(name, names, 3, 0.3) or names)[:3])


def _dims_text(factors: OpFactors, factor: int, is_batch: bool) -> str:
    """Return the dims that a factor runs over, e.g. `batch (operand 0 dim 0, result dim 0)`."""
    arrays = [(f"operand {k}", dims) for k, dims in enumerate(factors.operands)]
    several = len(factors.results) > 1
    arrays += [
        (f"result {r}" if several else "result", dims) for r, dims in enumerate(factors.results)
    ]
    dims = ", ".join(
        f"{name} dim {dim}"
        for name, dim_factors in arrays
        for dim, inner in enumerate(dim_factors)
        if factor in inner
    )
    words = ["batch"] * is_batch + ["contracted"] * (factors.kinds[factor] in PARTIAL)
    return f"{' '.join(words)} ({dims})".strip()
