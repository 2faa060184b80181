"""Costs of kernels by name, which users register for kernels that no model knows.

The front ends look up the name of a kernel: the name of a Pallas kernel, the target of a custom
call, or the name of a primitive of a library.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from simulator.array_type import Array
from simulator.work import Kernel, KernelKind


class KernelCostError(RuntimeError):
    """A registered cost function raised an error, or returned no `KernelCost`."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost of one launch of a kernel on one device.

    Attributes:
        flops: floating point operations; a multiply-add is two.
        bytes: bytes that it reads from and writes to device memory.
        kind: what bounds it: "memory"; or the matrix units, fed by a product ("gemm"), a
            convolution ("conv") or fused attention ("attention", "attention backward").

    Raises:
        TypeError: FLOP or bytes are no number.
        ValueError: a number is negative or not finite, or the kind is unknown.
    """

    flops: float
    bytes: float
    kind: KernelKind = "memory"

    def __post_init__(self) -> None:
        for field, number in {"flops": self.flops, "bytes": self.bytes}.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"KernelCost: {field} is {number!r}; expected a number")
            if not math.isfinite(number) or number < 0:
                raise ValueError(f"KernelCost: {field} is {number}; expected a finite number >= 0")
        if self.kind not in get_args(KernelKind):
            kinds = ", ".join(map(repr, get_args(KernelKind)))
            raise ValueError(f"KernelCost: kind is {self.kind!r}; expected one of {kinds}")


type CostFunction = Callable[[Sequence[Array], Sequence[Array]], KernelCost]
"""Maps operands and results on one device, with `dtype` and `dims`, to the cost of the kernel."""

_COSTS: dict[str, CostFunction] = {}


def register_kernel_cost(name: str, cost: CostFunction) -> None:
    """Register the cost of a kernel that no model knows.

    Predictions from a plan and from compiled HLO use it wherever a kernel has this name.

    Args:
        name: the `name` of a `pallas_call` (of its function, if it has none), the target of a
            custom call, or the name of a primitive, as those of Transformer Engine.
        cost: maps the operands and the results to a `KernelCost`. Each is a list of arrays of one
            device, which have a `dtype` as HLO spells it ("bf16") and `dims`.

    Raises:
        TypeError: the name is no string, or the cost no function.
        ValueError: the name is empty, or has a cost already.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a kernel is {name!r}; expected a string")
    if not callable(cost):
        raise TypeError(
            f"the cost of kernel {name!r} is {cost!r}; expected a function of operands and results"
        )
    if not name:
        raise ValueError("the name of a kernel is empty; expected, for example, 'flash_attention'")
    if name in _COSTS:
        raise ValueError(f"kernel {name!r} has a cost already; register it once")
    _COSTS[name] = cost


def has_cost(name: str) -> bool:
    """Return whether a cost is registered for the name of a kernel."""
    return name in _COSTS


def registered_kernel(
    name: str, operands: Sequence[Array], results: Sequence[Array], launch: str
) -> Kernel:
    """Return the kernel with the registered cost of `name`, which there must be.

    Args:
        name: the name of the kernel.
        operands: operands on one device.
        results: results on one device.
        launch: the name of the launch in timelines.

    Raises:
        KernelCostError: the function raises an error, or returns no `KernelCost`.
    """
    try:
        cost = _COSTS[name](operands, results)
    except Exception as error:
        arrays = f"{list(operands)} -> {list(results)}"
        raise KernelCostError(
            f"the cost of kernel {name!r} failed for {arrays}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(cost, KernelCost):
        raise KernelCostError(
            f"the cost of kernel {name!r} returned {cost!r}; expected a KernelCost"
        )
    dtype = next((array.dtype for array in (*operands, *results)), "f32")
    return Kernel(launch, cost.kind, cost.flops, cost.bytes, dtype)
