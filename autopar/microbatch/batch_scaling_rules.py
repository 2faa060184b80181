"""What the primitives of JAX make of the kinds of their operands (`autopar.microbatch.batch_scaling`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Var

from autopar.ir.graph import Where


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


_PRODUCTS = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
_SCATTERS = {"scatter-add", "scatter-sub"}
ADDS = {
    "add",
    "add_any",
    "sub",
    "concatenate",
    "stack",
    *_SCATTERS,
    "dynamic_update_slice",
    "pad",
    "complex",
}
_SCALES = {
    *("neg", "convert_element_type", "copy", "copy_p", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice"),
    *("reduce_sum", "stop_gradient", "split", "rev", "cumsum", "real", "imag", "optimization_barrier", "accumulate"),
    *("dynamic_slice", "gather", "name", "tile", "unstack", "reduce_window_sum", "select_and_scatter_add", "fft", "conj"),
}  # fmt: skip
_INDEXED = {
    "gather": 1,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
    "select_and_scatter_add": 1,
}  # data before indices
_ORDERED = {
    "max",
    "min",
    "abs",
    "reduce_max",
    "reduce_min",
    "reduce_window_max",
    "cummax",
    "cummin",
    "sort",
    "top_k",
}  # keep a positive factor, but are not linear


def power_of(
    name: str, eqn: JaxprEqn, operands: Sequence[BatchScaling], where: Where
) -> int | None:
    """The power of the result, from those of the operands."""
    powers = [kind.power for kind in operands]
    if name in _PRODUCTS:
        return None if None in powers else sum(p for p in powers if p is not None)
    if name == "div":
        return None if powers[0] is None else powers[0] - (powers[1] or 0)
    if name in ("integer_pow", "square"):
        return None if powers[0] is None else powers[0] * eqn.params.get("y", 2)
    if (
        name in _SCATTERS
        and operands[2].form == "rows"
        and operands[0].form != "rows"
        and powers[0] is not None
    ):
        raise NotSeparable(f"{where} adds a sum over examples to something else in place")
    data = [powers[k] for k in added(name, len(powers))]
    if name in ADDS | _SCALES | _ORDERED | {"select_n"}:
        known = {p for p in data if p is not None}
        if len(known) > 1:
            raise NotSeparable(f"{where} adds a sum over examples to a mean over examples")
        return known.pop() if known else None
    if any(powers):
        raise NotSeparable(f"{where} is not linear in the size of the batch")
    return 0


def added(name: str, count: int) -> Sequence[int]:
    """The positions of operands that end up in the result, of a primitive that adds, chooses or scales."""
    if name == "select_n":
        return range(1, count)
    if name in _SCATTERS:
        return (0, 2)
    return range(_INDEXED.get(name, count))


def is_linear(name: str, linear: Sequence[int]) -> bool:
    """Whether the primitive is linear in the operands at the positions `linear`, taken together."""
    if name in _PRODUCTS:
        return len(linear) == 1
    if name == "div":
        return linear == [0]
    return name in ADDS | _SCALES | {"select_n"} and set(linear) <= set(
        added(name, max(linear) + 1)
    )
