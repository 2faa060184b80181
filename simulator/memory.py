"""Memory of one device during a step, by role."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
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
"""What memory stores.

- parameters: the parameters.
- optimizer: the state that the step updates beside them.
- gradients: gradients of parameters, accumulated or waiting for the update.
- activations: values saved for the backward pass.
- inputs: the batch and other inputs.
- outputs: results that don't reuse an input.
- communication: copies of what other devices store.
- temporaries: everything else.
"""

Level = Mapping[Role, int]
"""Bytes on one device at one time, by role."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device: the compiler's buffer assignment, or an estimate of it.

    Attributes:
        arguments: inputs of the step, donated ones included.
        outputs: results of the step, those that reuse a donated input included.
        aliased: the part of `outputs` that reuses donated inputs.
        temporaries: what is live only while the step runs.
        roles: the total by role; empty if unknown.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    roles: Mapping[Role, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.roles and sum(self.roles.values()) != self.total:
            raise ValueError(
                f"roles {dict(self.roles)} sum up to {sum(self.roles.values())},"
                f" expected {self.total}"
            )

    @property
    def total(self) -> int:
        """Bytes that must be free on the device to run the step."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def parts(self) -> dict[str, int]:
        """Return the parts of the total.

        These are the roles if they are known. Otherwise they are the compiler's categories, where
        outputs are those that don't reuse arguments.
        """
        if self.roles:
            return {**self.roles}
        new = self.outputs - self.aliased
        return {"arguments": self.arguments, "outputs": new, "temporaries": self.temporaries}


def apportion(
    parts: Mapping[Role, float],
    total: int,
    rest: Role,
    peak: Mapping[Role, float] | None = None,
) -> dict[Role, int]:
    """Return `parts` as whole bytes, which sum up to `total` at the peak.

    Args:
        parts: estimates of the bytes of each role. If they exceed `total` at the peak, all shrink
            by the same factor.
        total: bytes at the peak, which are exact.
        rest: the role of the bytes that the estimates lack at the peak, at any time.
        peak: the estimates at the peak; by default `parts`.
    """
    peak = parts if peak is None else peak
    shrink = min(1.0, total / (sum(peak.values()) or 1.0))
    whole: dict[Role, int] = {role: int(shrink * size) for role, size in parts.items()}
    lacking = total - sum(int(shrink * size) for size in peak.values())
    whole[rest] = whole.get(rest, 0) + lacking
    return {role: size for role, size in whole.items() if size}


def sum_roles[Bytes: (int, float)](*mappings: Mapping[Role, Bytes]) -> dict[Role, Bytes]:
    """Return the sum of bytes, role by role."""
    total: dict[Role, Bytes] = {}
    for sizes in mappings:
        for role, size in sizes.items():
            total[role] = total[role] + size if role in total else size
    return total


def with_roles(
    use: MemoryUse, arguments: Mapping[Role, float], temporaries: Mapping[Role, float]
) -> MemoryUse:
    """Return `use` with roles.

    Args:
        use: the memory of a device, whose numbers of bytes are exact.
        arguments: estimated bytes of the arguments by role.
        temporaries: estimated bytes of the temporaries by role, at the peak.
    """
    return replace(use, roles=level_of(use, arguments, temporaries, temporaries))


def level_of(
    use: MemoryUse,
    arguments: Mapping[Role, float],
    temporaries: Mapping[Role, float],
    peak: Mapping[Role, float],
) -> dict[Role, int]:
    """Return the memory of a device by role at one time of a program.

    Args:
        use: the memory of the device at the peak, whose numbers of bytes are exact.
        arguments: estimated bytes of the arguments by role.
        temporaries: estimated bytes of the temporaries by role, at that time.
        peak: estimated bytes of the temporaries by role, at the peak.
    """
    outputs = use.outputs - use.aliased
    return sum_roles(
        apportion(arguments, use.arguments, "inputs"),
        apportion({"outputs": outputs}, outputs, "outputs"),
        apportion(temporaries, use.temporaries, "temporaries", peak),
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Peak memory of a device, and its capacity.

    Attributes:
        parts: bytes by role, or by category of the compiler; empty if unknown.
        reserve: bytes that no step gets: the driver's own, workspaces of libraries,
            communication buffers.
        capacity: bytes of the device.
        fragmentation: bytes between allocations, which no allocation fits into.
        deviation: standard deviation of the bytes that are taken; 0 if they are exact.
    """

    parts: Mapping[str, float]
    reserve: float
    capacity: float
    fragmentation: float = 0.0
    deviation: float = 0.0

    @property
    def total(self) -> float:
        """Bytes that the step allocates."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes that are taken, by the step, by fragmentation or by the reserve."""
        return self.total + self.fragmentation + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the device has room, which is at least as probable as not.

        Raises:
            ValueError: the memory is unknown.
        """
        return self._free >= 0

    @property
    def fit_probability(self) -> float:
        """The probability that the device has room, as errors of the bytes are normal.

        Raises:
            ValueError: the memory is unknown.
        """
        if not self.deviation:
            return float(self.fits)
        return NormalDist(sigma=self.deviation).cdf(self._free)

    @property
    def _free(self) -> float:
        if not self.parts:
            raise ValueError(
                "nothing is known of the memory; give the program `memory`, one MemoryUse per mesh"
            )
        return self.capacity - self.reserved
