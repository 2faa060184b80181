"""The costs of work on a cluster that a backend drives."""

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from simulator.backend import EAGER, Backend
from simulator.costs.collective_model import CollectiveModel
from simulator.costs.gemm import GemmModel
from simulator.costs.kernel_model import KernelModel
from simulator.engine.stream_rules import added_seconds
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.kernel_profile import FusedAttentionKind, Passes
from simulator.hardware.topology import Ring
from simulator.transformer.precision import RECIPES, Precision, Recipe

_CHANNELS_OF_PEER = 2
"""Channels, each of which occupies a core, of messages to a device of another host, and of those
from one (github.com/NVIDIA/nccl, NCCL_NCHANNELS_PER_NET_PEER in src/graph/paths.cc)."""


class FlashRates(NamedTuple):
    """Speed of fused attention.

    Attributes:
        forward: FLOP/s of the forward pass.
        backward: FLOP/s of the backward pass.
        least_head: head size below which a score takes as long as one of that size.
    """

    forward: float
    backward: float
    least_head: int


@dataclass(frozen=True)
class Machine:
    """A cluster that a backend drives, with the costs of work on it.

    Attributes:
        cluster: the hardware.
        backend: the software.
        spread: relative standard deviation of the speed of equal devices; a step waits for the
            slowest. By default 8 % are between the whiskers of a box plot, which are 5.4 standard
            deviations apart (Sinha et al., SC 2022, arXiv 2208.11035).
    """

    cluster: Cluster
    backend: Backend = EAGER
    spread: float = 0.015

    def for_devices(self, devices: int) -> "Machine":
        """Return the machine without the hosts that a step on its first `devices` leaves idle."""
        hosts = -(-devices // self.cluster.devices_per_host)
        if hosts == self.cluster.hosts:
            return self
        if hosts not in self._known_parts:
            self._known_parts[hosts] = replace(self, cluster=self.cluster.with_size(hosts))
        return self._known_parts[hosts]

    @cached_property
    def _known_parts(self) -> "dict[int, Machine]":
        return {}

    @cached_property
    def kernels(self) -> KernelModel:
        """Costs of kernels on a device in training."""
        return KernelModel(
            self.cluster.device, hot=self.cluster.device.kernels.throttles_in_training
        )

    @cached_property
    def network(self) -> CollectiveModel:
        """Costs of communication."""
        return CollectiveModel(self.cluster)

    @cached_property
    def gemms(self) -> GemmModel:
        """Costs of 16-bit matrix products, in the faster format."""
        return max(map(self.kernels.products, ("bf16", "f16")), key=lambda model: model.peak)

    def exposed_seconds(self, moved: float, compute: float, between_hosts: bool) -> float:
        """Return the seconds by which communication lengthens computation that overlaps with it.

        Args:
            moved: seconds of the communication alone.
            compute: seconds of the computation alone.
            between_hosts: whether the communication is between hosts, whose link has its own
                contention factor.
        """
        contention = self.network.link(between_hosts).contention_factor
        return added_seconds(moved, compute, contention)

    def exposed_send(self, sent: float, compute: float, between_hosts: bool) -> float:
        """Return the seconds by which messages to other devices lengthen computation beside them.

        Between hosts they occupy the cores of few channels instead of those of a collective.

        Args:
            sent: seconds of the messages alone.
            compute: seconds of the computation alone.
            between_hosts: whether the messages are between hosts.
        """
        contention = self.network.link(between_hosts).contention_factor
        if between_hosts:
            occupied = 2 * _CHANNELS_OF_PEER / self.cluster.device.cores
            contention = min(contention, 1 + occupied)
        return added_seconds(sent, compute, contention)

    def tensor_contention(self, between_hosts: bool) -> float:
        """Return the contention factor of products and tensor collectives that overlap."""
        factor = self.backend.tensor_contention
        if factor is None or between_hosts:
            return self.network.link(between_hosts).contention_factor
        return factor

    def data_ring(self, size: int, stride: int) -> Ring:
        """Return the ring of a data group, through as many NICs as the backend uses."""
        ring = self.network.ring(size, stride)
        max_nics = self.backend.max_nics
        return ring if max_nics is None else replace(ring, nics=min(ring.nics, max_nics))

    def gathered_as(self, precision: Precision) -> Recipe:
        """Return the recipe in whose widths devices gather what products read."""
        return RECIPES[precision] if self.backend.gathers_casts else RECIPES["bf16"]

    def linear_products(self, precision: Precision) -> GemmModel:
        """Return the costs of the products of linear layers; a `ClusterError` if there are none."""
        dtype = RECIPES[precision].dtype
        if dtype is None:
            return self.gemms
        device = self.cluster.device
        if dtype not in device.peak_tflop_per_s:
            raise ClusterError(
                f"precision {precision}: {device.name!r} has no {dtype} among its peaks, which are "
                f"{', '.join(device.peak_tflop_per_s)}"
            )
        return self.kernels.products(dtype)

    @cached_property
    def launch_seconds(self) -> float:
        """Seconds from the end of a kernel to the start of the next."""
        return self.cluster.device.kernel_launch_us * 1e-6

    def flash(self, generation: FusedAttentionKind) -> "FlashRates":
        """Return how fast fused attention is."""
        if generation not in self._known_flash:
            attention = self.cluster.device.kernels.attention
            reached: Passes = getattr(attention, generation) or attention.cudnn or attention.flash2
            self._known_flash[generation] = FlashRates(
                self.gemms.peak * reached.forward,
                self.gemms.peak * reached.backward,
                attention.cudnn_least_head if generation.startswith("cudnn") else 1,
            )
        return self._known_flash[generation]

    @cached_property
    def _known_flash(self) -> "dict[FusedAttentionKind, FlashRates]":
        return {}

    def slowest_of(self, devices: int) -> float:
        """Return how much slower the slowest of `devices` devices is than the mean, a factor.

        It is the expected maximum of normal deviates (Blom, Statistical Estimates and Transformed
        Beta-Variables, 1958).
        """
        return 1 + self.spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    def memory_seconds(self, num_bytes: float, kernels: int) -> float:
        """Return the seconds of elementwise kernels, each of which moves its part of the bytes."""
        return self.kernels.elementwise(num_bytes, kernels)
