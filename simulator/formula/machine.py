"""What the formulas know of the hardware and of the software that drives it."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt
from typing import Self

from simulator.cluster import Cluster
from simulator.collectives import Network
from simulator.gemm import GemmModel, GemmProfile

# Fractions of the peak that fused attention reaches, forward and backward. A100 and H100: Dao, FlashAttention-2 (arXiv 2307.08691),
# causal, head size 128, 2k to 16k tokens; later kernels for Hopper and Blackwell: Shah et al., FlashAttention-3 (arXiv 2407.08608).
_FLASH = {"A100": (0.57, 0.48), "H100": (0.38, 0.32), "H200": (0.38, 0.32), "B200": (0.50, 0.40), "V100": (0.30, 0.25)}


@dataclass(frozen=True, slots=True)
class Backend:
    """The software: what a launch costs the host, and how well things are fused.

    Attributes:
        kernel_us: of the host for a kernel; a device that computes faster than that waits for the host.
        step_us: of the host for a step, beside its kernels.
        update_bytes: read and written per parameter by the optimizer, clipping and unscaling included.
    """

    name: str
    kernel_us: float
    step_us: float
    update_bytes: float


EAGER = Backend("eager", kernel_us=10.0, step_us=5e3, update_bytes=60.0)
"""PyTorch as Megatron uses it: the host launches kernel by kernel."""

JITTED = Backend("jitted", kernel_us=1.0, step_us=200.0, update_bytes=32.0)
"""A compiled step: launches are cheap, the update is one fusion."""


@dataclass(frozen=True)
class Machine:
    """A cluster with the fitted models of its devices and network, driven by a backend.

    Attributes:
        contention: by how much computation slows while a collective runs beside it, as a fraction of the time they share.
        spread: standard deviation of the speed of devices of one kind; a step waits for the slowest of all.
    """

    cluster: Cluster
    gemms: GemmModel
    network: Network
    backend: Backend = EAGER
    contention: float = 0.15
    spread: float = 0.01

    @classmethod
    def of(cls, cluster: Cluster, backend: Backend = EAGER) -> Self:
        profile = GemmProfile.of(cluster.device.name)
        return cls(cluster, GemmModel(profile, hot=True), Network.of(cluster), backend)

    @cached_property
    def linear_f8(self) -> GemmModel:
        """Products of 8-bit numbers: twice the speed, half the traffic."""
        return replace(self.gemms, speed=2.0, width=1)

    @cached_property
    def memory_bandwidth(self) -> float:
        """Bytes per second of large elementwise kernels."""
        device = self.cluster.device
        return device.memory_bandwidth_gb_per_s * 1e9 * device.memory_efficiency

    @cached_property
    def launch_seconds(self) -> float:
        """From the end of a kernel to the start of the next."""
        return self.cluster.device.kernel_launch_us * 1e-6

    @cached_property
    def flash(self) -> tuple[float, float]:
        """FLOP/s of fused attention, forward and backward."""
        peak = self.gemms.profile.peak_tflop_per_s * 1e12
        forward, backward = next((rates for gpu, rates in _FLASH.items() if gpu in self.cluster.device.name), (0.3, 0.25))
        return peak * forward, peak * backward

    def slowest_of(self, devices: int) -> float:
        """By how much the slowest of so many devices is slower than the usual one: the expected maximum of normal deviates, about."""
        return 1 + self.spread * sqrt(2 * log(max(1, devices)))

    def memory_seconds(self, num_bytes: float, kernels: int) -> float:
        """Seconds of elementwise kernels that move so many bytes altogether."""
        return num_bytes / self.memory_bandwidth + kernels * self.launch_seconds
