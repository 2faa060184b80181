"""What the formulas know of the hardware, driven by a backend."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt

from simulator.backend import EAGER, Backend
from simulator.cluster import Cluster
from simulator.collectives import Network
from simulator.compute import KernelModel
from simulator.description import ClusterError
from simulator.gemm import GemmModel
from simulator.network import Ring

# Fractions of the peak that fused attention reaches on long causal sequences, forward and backward, by generation of its kernels.
# Second: Dao, FlashAttention-2 (arXiv 2307.08691), figures for head size 128. First: about 0.6 of that, as in the same paper; the exact values
# are those of two rows of llm-foundry's table with long sequences, 125m at 32768 tokens on A100 and 1b at 65536 on H100. V100 and B200 are
# guesses in proportion.
_FLASH = {
    "V100": {"flash": (0.25, 0.20), "flash2": (0.25, 0.20)},
    "A100": {"flash": (0.36, 0.31), "flash2": (0.57, 0.50)},
    "H100": {"flash": (0.21, 0.17), "flash2": (0.36, 0.30)},
    "H200": {"flash": (0.21, 0.17), "flash2": (0.36, 0.30)},
    "B200": {"flash": (0.25, 0.20), "flash2": (0.45, 0.35)},
}


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
        return KernelModel(self.cluster.device, hot=self.cluster.device.kernels.hot_in_training)

    @cached_property
    def network(self) -> Network:
        return Network(self.cluster)

    @cached_property
    def gemms(self) -> GemmModel:
        """Products of 16-bit numbers, of the faster format."""
        return max(map(self.kernels.products, ("bf16", "f16")), key=lambda model: model.peak)

    def beside(self, moved: float, compute: float, far: bool) -> float:
        """Seconds that communication adds to computation beside it, within a host or far; both are slower meanwhile."""
        slowdown = self.network.link(far).slowdown
        return max(0.0, moved - compute) + (slowdown - 1) * min(moved, compute)

    def data_ring(self, size: int, stride: int) -> Ring:
        """The ring of a data group, through as many network cards as the backend uses."""
        ring = self.network.ring(size, stride)
        rails = self.backend.rails
        return ring if rails is None else replace(ring, nics=min(ring.nics, rails))

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

    def flash(self, generation: str) -> tuple[float, float]:
        """FLOP/s of fused attention, forward and backward, of "flash" or "flash2"."""
        gpu = next((gpu for gpu in _FLASH if gpu in self.cluster.device.name), "V100")
        forward, backward = _FLASH[gpu][generation]
        return self.gemms.peak * forward, self.gemms.peak * backward

    def slowest_of(self, devices: int) -> float:
        """By how much the slowest of so many devices is slower than the usual one: the expected maximum of normal deviates, about."""
        return 1 + self.spread * sqrt(2 * log(max(1, devices)))

    def memory_seconds(self, num_bytes: float, kernels: int) -> float:
        """Seconds of elementwise kernels that move so many bytes altogether, in equal parts."""
        return self.kernels.elementwise(num_bytes, kernels)
