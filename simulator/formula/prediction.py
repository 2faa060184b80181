"""What is predicted of a training step."""

from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

from simulator.formula.memory import Memory

# Standard deviations of the error of each kind of time, such that four fifths of the rows of published tables lie between P10 and P90.
_DEVIATION = {"compute": 0.08, "network": 0.15, "host": 0.25}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step, in seconds; the parts sum up to `seconds`.

    Attributes:
        forward, backward, recompute: computation of all microbatches on the busiest device.
        update: the optimizer.
        bubble: waiting for other stages.
        host: waiting for the host to launch kernels.
        exposed: by axis ("tensor", "pipeline", "data"), communication that nothing hides.
        communication: by axis, all of it.
        memory: bytes on the device that needs most.
        model_flops, hardware_flops: of all devices, without and with what is computed twice.
        peak_flop_per_s: of all devices.
        devices: how many.
        tokens: of the step.
    """

    seconds: float
    forward: float
    backward: float
    recompute: float
    update: float
    bubble: float
    host: float
    exposed: dict[str, float]
    communication: dict[str, float]
    memory: Memory
    model_flops: float
    hardware_flops: float
    peak_flop_per_s: float
    devices: int
    tokens: int

    @property
    def tflop_per_s_per_device(self) -> float:
        """Model FLOP."""
        return self.model_flops / self.seconds / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation."""
        return self.model_flops / self.seconds / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: what is computed twice counts twice."""
        return self.hardware_flops / self.seconds / self.peak_flop_per_s

    def quantile(self, probability: float) -> float:
        """Seconds that the step takes at most with this probability, between 0 and 1, both excluded.

        Errors of the kinds of time are taken to be independent and their effect on the whole log-normal.
        """
        if not 0 < probability < 1:
            raise ValueError(f"a probability of {probability}; expected one between 0 and 1")
        network = sum(self.exposed.values())
        parts = {"compute": self.seconds - network - self.host, "network": network, "host": self.host}
        deviation = sqrt(sum((_DEVIATION[kind] * part / self.seconds) ** 2 for kind, part in parts.items()))
        return self.seconds * exp(deviation * NormalDist().inv_cdf(probability))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds
