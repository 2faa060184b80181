"""Memory of one device over one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal[
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "inputs",
    "outputs",
    "communication",
    "temporaries",
]
"""What memory holds: parameters; the state carried beside them; gradients of parameters, added up or waiting for the update; what
the forward pass leaves for the backward pass; the batch and other inputs; results in a place of their own; copies of what other
devices hold; and all that is needed for a moment."""

Level = Mapping[Role, int]
"""Bytes on one device at some moment, by what they hold."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device: the compiler's buffer assignment, or an estimate of it.

    Attributes:
        arguments: inputs of the step, donated ones included.
        outputs: results of the step, those that reuse a donated input included.
        aliased: the part of `outputs` that lives in donated inputs.
        temporaries: what is alive only while the step runs.
        roles: the total by what it holds; empty if nobody says.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    roles: Mapping[Role, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.roles and sum(self.roles.values()) != self.total:
            raise ValueError(
                f"roles {dict(self.roles)} sum up to {sum(self.roles.values())}, expected {self.total}"
            )

    @property
    def total(self) -> int:
        """Bytes that must be free on the device to run the step."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def parts(self) -> dict[str, int]:
        """The total by what it holds: by role, or else as the compiler counts, outputs without those that live in arguments."""
        if self.roles:
            return {**self.roles}
        new = self.outputs - self.aliased
        return {"arguments": self.arguments, "outputs": new, "temporaries": self.temporaries}


def apportioned(parts: Mapping[Role, float], total: int, rest: Role) -> dict[Role, int]:
    """`parts` as whole bytes that sum up to `total`: what they lack is of the role `rest`, where they are too many all shrink alike."""
    shrink = min(1.0, total / (sum(parts.values()) or 1.0))
    found: dict[Role, int] = {role: int(shrink * size) for role, size in parts.items()}
    found[rest] = found.get(rest, 0) + total - sum(found.values())
    return {role: size for role, size in found.items() if size}


def added[Bytes: (int, float)](*several: Mapping[Role, Bytes]) -> dict[Role, Bytes]:
    """The sum, role by role."""
    total: dict[Role, Bytes] = {}
    for each in several:
        for role, size in each.items():
            total[role] = total[role] + size if role in total else size
    return total


def with_roles(
    use: MemoryUse, arguments: Mapping[Role, float], temporaries: Mapping[Role, float]
) -> MemoryUse:
    """`use`, with what its arguments and its temporaries hold; it has the last word on how many bytes these are."""
    roles = added(
        apportioned(arguments, use.arguments, "inputs"),
        apportioned({"outputs": use.outputs - use.aliased}, use.outputs - use.aliased, "outputs"),
        apportioned(temporaries, use.temporaries, "temporaries"),
    )
    return replace(use, roles=roles)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a device holds when it is fullest, and whether it can.

    Attributes:
        parts: bytes by what they are: parameters, activations, ...
        reserve: bytes that no step gets: the driver's, workspaces of libraries, communication buffers.
        capacity: bytes of the device.
    """

    parts: Mapping[str, float]
    reserve: float
    capacity: float

    @property
    def total(self) -> float:
        """Bytes that the step allocates."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes that are taken, whoever has them."""
        return self.total + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the device has room. Without parts, nobody knows: `ValueError`."""
        if not self.parts:
            raise ValueError(
                "nothing is known of the memory; give the program `memory`, one MemoryUse per mesh"
            )
        return self.reserved <= self.capacity
