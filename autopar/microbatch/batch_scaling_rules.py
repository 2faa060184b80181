"""The batch scaling of a value, and the power of a primitive's result from those of its operands.

`autopar.microbatch.batch_scaling` applies them to a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import scatter_add_p
from jax.lax import scatter_sub_p

from autopar.ir.graph import Where
from autopar.primitives.linearity import algebra_of, data_operands


@dataclass(frozen=True, slots=True)
class BatchScaling:
    """How the value of the whole batch follows from the values of its microbatches.

    Attributes:
        form: "same" if all microbatches have the same value; "rows" if it has a row per example
            along `dim`; "linear" if the mean over the microbatches gives it; "function" if it is a
            scalar computed from linear ones, and is known only when these are complete.
        power: the value of the whole batch has an additional factor of count ** power, for `count`
            microbatches. None for zeros, which fit any power.
        dim: the dim of the examples if the form is "rows".
        per: statistic of the batch by which the value is divided. The other attributes describe the
            value times this scalar.
    """

    form: OneOf["same", "rows", "linear", "function"]
    power: int | None = 0
    dim: int = 0
    per: Var | None = None


class NotSeparable(Exception):
    """The value of the whole batch does not follow from those of its microbatches."""


def power_of(eqn: JaxprEqn, operands: Sequence[BatchScaling], where: Where) -> int | None:
    """Return the power of the result from those of the operands; None for zeros.

    Args:
        eqn: the equation.
        operands: the batch scalings of its operands.
        where: names the equation in errors.

    Raises:
        NotSeparable: the result does not scale with a power of the batch size.
    """
    powers = [scaling.power for scaling in operands]
    nonzero = [power for power in powers if power is not None]
    match algebra_of(eqn):
        case "product":
            return sum(nonzero) if len(nonzero) == len(powers) else None
        case "quotient":
            return None if powers[0] is None else powers[0] - (powers[1] or 0)
        case "power":
            return None if powers[0] is None else powers[0] * eqn.params.get("y", 2)
        case "sum" | "linear" | "selection" | "homogeneous":
            if _scatters_rows(eqn, operands) and powers[0] is not None:
                raise NotSeparable(f"{where} adds a sum over examples to another array in place")
            data = {powers[k] for k in data_operands(eqn)} - {None}
            if len(data) > 1:
                raise NotSeparable(f"{where} adds a sum over examples to a mean over examples")
            return data.pop() if data else None
    if any(powers):
        raise NotSeparable(f"{where} is not linear in the size of the batch")
    return 0


def _scatters_rows(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
    """Return whether rows of examples are added into an array without a batch dim."""
    scatters = eqn.primitive in (scatter_add_p, scatter_sub_p)
    return scatters and operands[2].form == "rows" and operands[0].form != "rows"
