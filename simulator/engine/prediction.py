"""The prediction of a training step: seconds by part, memory, throughput and utilization."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, hypot, isfinite, nan
from statistics import NormalDist

from simulator.backend import SOFTWARE_DEVIATION
from simulator.engine.timeline import Timeline
from simulator.memory import Footprint

PARTS = ("forward", "backward", "recompute", "update", "unattributed", "bubble", "host")
"""The parts of the time, beside exposed communication."""

# Standard deviations of the relative error of each kind of time. On rows outside the fits, products
# and collectives measured one by one have mean errors of 6 to 7 % and 5 to 9 %; standard deviations
# are a quarter larger than mean errors. Those measurements lack NIC contention, so the network's
# deviation is half as large again. The host's is a guess. `python -m simulator validate` prints how
# often published steps are in the interval, also with all deviations scaled to the other sets.
_DEVIATION = {"compute": 0.08, "network": 0.15, "host": 0.25}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of one training step, in seconds.

    The parts and the values of `exposed` sum up to `seconds`.

    Attributes:
        seconds: the step.
        forward: forward computation of all microbatches on the busiest device.
        backward: backward computation, likewise.
        recompute: remat, likewise. Programs have it if JAX's names of operations show it
            (`jax.checkpoint`); otherwise it is part of `backward`.
        update: the optimizer.
        bubble: waits for other stages.
        host: waits for the host to launch kernels or to issue instructions.
        exposed: exposed communication, by mesh axis. The axes of a scenario are "tensor",
            "pipeline" and "data"; those of a program are its mesh's ("x", or "x,y" for both), and
            "pipeline" for sends between stages. A collective of unknown axes counts by its kind.
        communication: all communication, likewise.
        memory: bytes on the device that needs most; without parts if unknown.
        model_flops: FLOP on all devices without remat; nan if unknown.
        hardware_flops: FLOP on all devices; nan if unknown.
        peak_flop_per_s: FLOP per second of all devices at the peaks of the dtypes in use.
        devices: the number of devices.
        tokens: tokens that the step learns from; 0 if unknown.
        examples: examples that the step learns from; 0 if unknown.
        unattributed: computation of a program without phases.
        software_deviation: standard deviation of the relative error that comes from software.
        unmodelled_kernels: how many kernels of each sort no model has the cost of. They were priced
            by the bytes that they must move.
        timeline: the timeline; None for a scenario.
    """

    seconds: float
    forward: float
    backward: float
    recompute: float
    update: float
    bubble: float
    host: float
    exposed: Mapping[str, float]
    communication: Mapping[str, float]
    memory: Footprint
    model_flops: float
    hardware_flops: float
    peak_flop_per_s: float
    devices: int
    tokens: int
    examples: int = 0
    unattributed: float = 0.0
    software_deviation: float = SOFTWARE_DEVIATION
    unmodelled_kernels: Mapping[str, int] = field(default_factory=dict)
    timeline: Timeline | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = (
            self.forward,
            self.backward,
            self.recompute,
            self.update,
            self.bubble,
            self.host,
            self.unattributed,
        )
        if isfinite(self.seconds + sum(parts) + sum(self.exposed.values()) + self.memory.total):
            return
        numbers = {
            "seconds": self.seconds,
            **{name: getattr(self, name) for name in PARTS},
            **{f"exposed {axis}": seconds for axis, seconds in self.exposed.items()},
            "memory": self.memory.total,
        }
        for name, number in numbers.items():
            if not isfinite(number):
                raise ValueError(
                    f"the prediction's {name} would be {number}; expected numbers of the cluster"
                    " and of what runs on it that are not so large or small"
                )

    @property
    def tflop_per_s_per_device(self) -> float:
        """Model TFLOP per second and device."""
        return self._rate(self.model_flops) / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: a part of the peak."""
        return self._rate(self.model_flops) / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization, with remat: a part of the peak."""
        return self._rate(self.hardware_flops) / self.peak_flop_per_s

    def quantile(self, probability: float) -> float:
        """Return the seconds that the step does not exceed with this probability.

        The errors of the kinds of time are assumed to be independent, and the error of the step to
        be log-normal.

        Raises:
            ValueError: the probability is not between 0 and 1, both excluded.
        """
        if not 0 < probability < 1:
            raise ValueError(f"a probability of {probability}; expected one between 0 and 1")
        if not self.seconds:
            return 0.0
        network = sum(self.exposed.values())
        parts = {
            "compute": self.seconds - network - self.host,
            "network": network,
            "host": self.host,
        }
        deviation = hypot(
            self.software_deviation,
            *(_DEVIATION[kind] * part / self.seconds for kind, part in parts.items()),
        )
        return self.seconds * exp(deviation * NormalDist().inv_cdf(probability))

    @property
    def examples_per_s(self) -> float:
        """Examples per second; nan if unknown."""
        return self._rate(self.examples or nan)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; nan if unknown."""
        return self._rate(self.tokens or nan)

    def _rate(self, amount: float) -> float:
        """Return the amount per second; nan for a step that takes no time."""
        return amount / self.seconds if self.seconds else nan

    def row(self) -> dict[str, float | int | bool]:
        """Return all values as a row of a table: `pandas.DataFrame([prediction.row(), ...])`."""
        row: dict[str, float | int | bool] = {"seconds": self.seconds}
        row |= {f"p{percent}": self.quantile(percent / 100) for percent in (10, 50, 90)}
        row |= {name: getattr(self, name) for name in PARTS}
        row |= {f"exposed {name}": seconds for name, seconds in self.exposed.items()}
        row |= {f"communication {name}": seconds for name, seconds in self.communication.items()}
        if self.memory.parts:
            row |= {f"memory {name}": num_bytes for name, num_bytes in self.memory.parts.items()}
            row |= {
                "allocated": self.memory.total,
                "reserved": self.memory.reserved,
                "fits": self.memory.fits,
                "fit_probability": self.memory.fit_probability,
            }
        rates = (
            "devices",
            "examples_per_s",
            "tokens_per_s",
            "tflop_per_s_per_device",
            "mfu",
            "hfu",
        )
        row |= {f"unmodelled {name}": count for name, count in self.unmodelled_kernels.items()}
        return row | {name: getattr(self, name) for name in rates}
