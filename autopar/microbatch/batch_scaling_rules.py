"""What the primitives of JAX make of the kinds of their operands (`autopar.microbatch.batch_scaling`)."""

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
    """How the whole batch's value relates to the microbatches'.

    Attributes:
        form: "same" for all microbatches; "rows", one per example along `dim`; "linear", the mean of the microbatches'; or
            "function", a scalar computed of linear ones, which is known only when those are complete.
        power: the whole batch's value is larger by count ** power; None for zeros, which fit any power.
        per: all this is said of the value times this statistic of the batch, a scalar by which something was divided.
    """

    form: OneOf["same", "rows", "linear", "function"]
    power: int | None = 0
    dim: int = 0
    per: Var | None = None


class NotSeparable(Exception):
    """Why a value has no kind."""


def power_of(eqn: JaxprEqn, operands: Sequence[BatchScaling], where: Where) -> int | None:
    """Return the power of the result, from those of the operands; None for zeros.

    Raises:
        NotSeparable: the result does not scale with a power of the batch size.
    """
    powers = [scaling.power for scaling in operands]
    known = [power for power in powers if power is not None]
    match algebra_of(eqn):
        case "product":
            return sum(known) if len(known) == len(powers) else None
        case "quotient":
            return None if powers[0] is None else powers[0] - (powers[1] or 0)
        case "power":
            return None if powers[0] is None else powers[0] * eqn.params.get("y", 2)
        case "sum" | "linear" | "selection" | "homogeneous":
            if _scatters_rows(eqn, operands) and powers[0] is not None:
                raise NotSeparable(f"{where} adds a sum over examples to something else in place")
            data = {powers[k] for k in data_operands(eqn)} - {None}
            if len(data) > 1:
                raise NotSeparable(f"{where} adds a sum over examples to a mean over examples")
            return data.pop() if data else None
    if any(powers):
        raise NotSeparable(f"{where} is not linear in the size of the batch")
    return 0


def _scatters_rows(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
    """Return whether rows of examples are added into an array that has none."""
    scatters = eqn.primitive in (scatter_add_p, scatter_sub_p)
    return scatters and operands[2].form == "rows" and operands[0].form != "rows"
