"""Memory of one device over one step."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device: the compiler's buffer assignment, or an estimate of it.

    Attributes:
        arguments: inputs of the step, donated ones included.
        outputs: results of the step, those that reuse a donated input included.
        aliased: the part of `outputs` that lives in donated inputs.
        temporaries: what is alive only while the step runs.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """Bytes that must be free on the device to run the step."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def parts(self) -> dict[str, int]:
        """The total by what it holds; outputs without those that live in arguments."""
        new = self.outputs - self.aliased
        return {"arguments": self.arguments, "outputs": new, "temporaries": self.temporaries}


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
            raise ValueError("nothing is known of the memory; give the program `memory`, one MemoryUse per mesh")
        return self.reserved <= self.capacity
