"""Memory of one device over one step."""

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
