"""What is predicted of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, nan, sqrt
from statistics import NormalDist

from simulator.engine.timeline import Timeline
from simulator.memory import Footprint

PARTS = ("forward", "backward", "recompute", "update", "unattributed", "bubble", "host")
"""Where the time goes, beside exposed communication."""

# Standard deviations of the relative error of each kind of time. Products and collectives that were measured one by one are off by 6 to 7 % and
# by 5 to 9 % on rows outside the fits, which are means: deviations are a quarter larger. Sharing of network cards is not among those
# measurements, so networks get half as much again, and what hosts do is a guess. `python -m simulator validate` says how often published
# steps are in the interval, also with all three scaled to sets other than the one that is looked at.
_DEVIATION = {"compute": 0.08, "network": 0.15, "host": 0.25}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step, in seconds; the parts, `exposed` among them, sum up to `seconds`.

    Attributes:
        forward, backward, recompute: computation of all microbatches on the busiest device. A compiled program tells what it computes again
            by the names that JAX gives operations (`jax.checkpoint`); without them it is part of `backward`.
        update: the optimizer.
        unattributed: computation of a program that is not cut into phases.
        bubble: waiting for other stages.
        host: waiting for the host to launch kernels or to hand over instructions.
        exposed: communication that nothing hides, by axis: "tensor", "pipeline" and "data" of a scenario; the axes of the mesh of a program
            ("x", or "x,y" along both; the kind of a collective that doesn't say), and "pipeline" for sends between stages.
        communication: all of it, likewise.
        memory: bytes on the device that needs most; without parts if the program does not say.
        model_flops, hardware_flops: of all devices, without and with what is computed twice; nan if the program does not say.
        peak_flop_per_s: of all devices, in the precisions that are used.
        devices: how many.
        tokens, examples: of the step; 0 if the program does not say.
        unmodelled_kernels: how many kernels of each sort were priced by the bytes they must move, as nobody knows what they cost.
        timeline: what happens when; None for a scenario.
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
                    f"the prediction's {name} would be {number}; expected numbers of the cluster and of what runs on it that are not so "
                    "large or small"
                )

    @property
    def tflop_per_s_per_device(self) -> float:
        """Model FLOP."""
        return self._rate(self.model_flops) / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation."""
        return self._rate(self.model_flops) / self.peak_flop_per_s

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: what is computed twice counts twice."""
        return self._rate(self.hardware_flops) / self.peak_flop_per_s

    def quantile(self, probability: float) -> float:
        """Seconds that the step takes at most with this probability, between 0 and 1, both excluded.

        Errors of the kinds of time are taken to be independent and their effect on the whole log-normal.
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
        deviation = sqrt(
            sum((_DEVIATION[kind] * part / self.seconds) ** 2 for kind, part in parts.items())
        )
        return self.seconds * exp(deviation * NormalDist().inv_cdf(probability))

    @property
    def examples_per_s(self) -> float:
        """nan if the program does not say how many there are."""
        return self._rate(self.examples or nan)

    @property
    def tokens_per_s(self) -> float:
        """nan if the program does not say how many there are."""
        return self._rate(self.tokens or nan)

    def _rate(self, amount: float) -> float:
        """How much of it a second; nan of a step that takes no time."""
        return amount / self.seconds if self.seconds else nan

    def row(self) -> dict[str, float | int | bool]:
        """Everything as one row of a table: `pandas.DataFrame([prediction.row(), ...])`."""
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
