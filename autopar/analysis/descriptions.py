"""Descriptions of the planner's candidates in words."""

from collections.abc import Collection
from difflib import get_close_matches

from autopar.analysis.replay import completions
from autopar.ir.spec import Spec, axes_of, partition_spec
from autopar.plan import spec_text
from autopar.primitives.factors import PARTIAL, Assignment, OpFactors


def describe(
    factors: OpFactors, assignment: Assignment, result: Spec, batch: Collection[int] = ()
) -> str:
    """What a candidate splits over which mesh axes, and how it completes partial results, e.g.

    `x on contracted (operand 0 dim 1, operand 1 dim 0), then all_reduce over x`.
    """
    parts = [
        f"{'+'.join(axes)} on {_where(factors, f, f in batch)}"
        for f, axes in enumerate(assignment)
        if axes
    ]
    text = ", ".join(parts) or "whole on every device"
    for kind, axis in completions(factors, assignment, result):
        onto = (
            ""
            if kind == "all_reduce"
            else f" onto dim {next(d for d, axes in enumerate(result) if axis in axes)}"
        )
        text += f", then {kind} over {axis}{onto}"
    return text


def describe_spec(spec: Spec) -> str:
    """`P(None, 'x')`, or `whole P(None, None)`."""
    text = spec_text(partition_spec(spec))
    return text if axes_of(spec) else f"whole {text}"


def nearest(name: str, known: Collection[str]) -> str:
    """Up to three of the `known` names that could have been meant, for an error."""
    inside = [other for other in known if name in other]
    return " or ".join((inside or get_close_matches(name, known, 3, 0.3) or list(known))[:3])


def _where(factors: OpFactors, factor: int, is_batch: bool) -> str:
    """A factor by the dims in which it is, `batch (operand 0 dim 0, result dim 0)`."""
    arrays = [(f"operand {k}", of) for k, of in enumerate(factors.operands)]
    several = len(factors.results) > 1
    arrays += [(f"result {r}" if several else "result", of) for r, of in enumerate(factors.results)]
    dims = ", ".join(
        f"{name} dim {dim}"
        for name, of in arrays
        for dim, inner in enumerate(of)
        if factor in inner
    )
    words = ["batch"] * is_batch + ["contracted"] * (factors.kinds[factor] in PARTIAL)
    return f"{' '.join(words)} ({dims})".strip()
