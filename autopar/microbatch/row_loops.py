"""Batch scalings in loops with an iteration for each row of examples, as of `jax.lax.map`.

A row is an example, a part of one, or some neighbouring examples. A microbatch runs fewer
iterations. What an iteration computes belongs to its own row. The loop may stack that, which gives
rows again, and add it up, which gives sums over the examples.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from autopar.ir.graph import source_line
from autopar.microbatch.batch_scaling_rules import BatchScaling, LoopOverExamples, NotSeparable
from autopar.microbatch.example_loops import ExampleLoops


def check_over_rows(loop: JaxprEqn, whole: JaxprEqn, count: int) -> None:
    """Check that a loop has an iteration for each row.

    Args:
        loop: the `loop` marker in the trace for the smaller batch.
        whole: the same marker in the trace for the larger batch.
        count: ratio of the batch sizes.

    Raises:
        LoopOverExamples: its length does not grow with the batch alone.
    """
    length, longer = (eqn.params.get("length") for eqn in (loop, whole))
    others, same = ({**eqn.params, "length": None} for eqn in (loop, whole))
    if not length or length * count != longer or others != same:
        raise LoopOverExamples(
            f"a loop at {source_line(loop)} is longer for a larger batch, and not by an iteration"
            " for each example"
        )


def check_carry(carry: JaxprEqn, loops: ExampleLoops) -> None:
    """Raise LoopOverExamples if a loop over rows carries something other than a sum."""
    if loops.summands(carry.outvars[0]) is None:
        raise LoopOverExamples(
            f"a loop at {source_line(carry)} goes through the examples and carries something other"
            " than sums from each to the next"
        )


def item(eqn: JaxprEqn, kind: BatchScaling) -> BatchScaling:
    """Return the scaling of the slice that an iteration takes of an array."""
    if kind.form != "rows" or kind.dim or kind.blocks not in (1, None) or kind.per:
        raise LoopOverExamples(
            f"a loop at {source_line(eqn)} is longer for a larger batch, and does not go through"
            " rows of examples"
        )
    return BatchScaling("item", kind.power)


def stacked(eqn: JaxprEqn, kind: BatchScaling) -> BatchScaling:
    """Return the scaling of an array that has a value of each iteration."""
    if kind.form not in ("item", "same") or kind.per:
        raise NotSeparable(
            f"a loop at {source_line(eqn)} goes through the examples and stacks what belongs to all"
            " of them"
        )
    return BatchScaling("rows", kind.power, 0, 1 if kind.form == "item" else None)


def summed(eqn: JaxprEqn, start: BatchScaling, summands: Sequence[BatchScaling]) -> BatchScaling:
    """Return the scaling of the sum of what all iterations add to a carry.

    Args:
        eqn: the `loop_result` of the carry.
        start: the scaling of the carry's initial value.
        summands: the scalings of what an iteration adds.
    """
    if not summands:
        return start
    powers = {kind.power for kind in summands if kind.power is not None}
    power = powers.pop() + 1 if powers else None
    forms = {kind.form for kind in summands}
    starts_alike = start.form in ("same", "linear") and start.power in (None, power)
    has_per = any(kind.per for kind in (start, *summands))
    if powers or not forms <= {"item", "same"} or not starts_alike or has_per:
        raise LoopOverExamples(
            f"a loop at {source_line(eqn)} adds up what is no sum over the examples"
        )
    is_constant = start.form == "same" and forms == {"same"}
    return BatchScaling("same" if is_constant else "linear", power)
