"""What work costs on a cluster that a backend drives."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt
from typing import Literal

from simulator.backend import EAGER, Backend
from simulator.costs.collective_model import Network
from simulator.costs.gemm import GemmModel
from simulator.costs.kernel_model import KernelModel
from simulator.engine.stream_rules import added_seconds
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.topology import Ring


@dataclass(frozen=True)
class Machine:
    """A cluster, with what work costs on it, driven by a backend.

    Attributes:
        spread: standard deviation of the speed of devices of one kind; a step waits for the slowest of all.
    """

    cluster: Cluster
    backend: Backend = EAGER
    spread: float = 0.01

    @cached_property
    def kernels(self) -> KernelModel:
        """What kernels cost on a device in training."""
        return KernelModel(
            self.cluster.device, hot=self.cluster.device.kernels.throttles_in_training
        )

    @cached_property
    def network(self) -> Network:
        return Network(self.cluster)

    @cached_property
    def gemms(self) -> GemmModel:
        """Products of 16-bit numbers, of the faster format."""
        return max(map(self.kernels.products, ("bf16", "f16")), key=lambda model: model.peak)

    def beside(self, moved: float, compute: float, far: bool) -> float:
        """Seconds that communication adds to computation beside it, within a host or far; both are slower meanwhile."""
        return added_seconds(moved, compute, self.network.link(far).contention_factor)

    def data_ring(self, size: int, stride: int) -> Ring:
        """The ring of a data group, through as many network cards as the backend uses."""
        ring = self.network.ring(size, stride)
        max_nics = self.backend.max_nics
        return ring if max_nics is None else replace(ring, nics=min(ring.nics, max_nics))

    @cached_property
    def linear_f8(self) -> GemmModel:
        """Products of 8-bit numbers. A device without them: `ClusterError`."""
        device = self.cluster.device
        if "f8e4m3fn" not in device.peak_tflop_per_s:
            raise ClusterError(
                f"precision f8: {device.name!r} has no f8e4m3fn among its peaks, which are {', '.join(device.peak_tflop_per_s)}"
            )
        return self.kernels.products("f8e4m3fn")

    @cached_property
    def launch_seconds(self) -> float:
        """From the end of a kernel to the start of the next."""
        return self.cluster.device.kernel_launch_us * 1e-6

    def flash(self, generation: Literal["flash", "flash2"]) -> tuple[float, float]:
        """FLOP/s of fused attention, forward and backward."""
        attention = self.cluster.device.kernels.attention
        reached = attention.flash if generation == "flash" else attention.flash2
        return self.gemms.peak * reached.forward, self.gemms.peak * reached.backward

    def slowest_of(self, devices: int) -> float:
        """By how much the slowest of so many devices is slower than the usual one: the expected maximum of normal deviates, about."""
        return 1 + self.spread * sqrt(2 * log(max(1, devices)))

    def memory_seconds(self, num_bytes: float, kernels: int) -> float:
        """Seconds of elementwise kernels that move so many bytes altogether, in equal parts."""
        return self.kernels.elementwise(num_bytes, kernels)
