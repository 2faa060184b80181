"""Cost models: what turns work into seconds. The planner and the engine ask the same one."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Protocol

from simulator.cluster import Cluster
from simulator.compute import kernel_seconds
from simulator.network import collective_seconds, find_routes, sent_fraction
from simulator.work import CollectiveKind, Groups, Kernel


class CostModel(Protocol):
    """Seconds of work on one cluster."""

    def kernel(self, kernel: Kernel, /) -> float:
        """Seconds that a kernel occupies the compute stream."""
        ...

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Seconds of a collective whose `groups` (ids in the cluster) all communicate at once.

        `num_bytes` counts as in `simulator.work.Collective`.
        """
        ...


class ClusterCosts:
    """Costs on a described cluster (`simulator.compute`, `simulator.network`); answers are remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

        @lru_cache(maxsize=1 << 16)
        def kernel_like(kind, flops, num_bytes, dtype, gemm) -> float:  # whatever its name
            return kernel_seconds(cluster.device, Kernel("", kind, flops, num_bytes, dtype, gemm))

        @lru_cache(maxsize=1 << 12)
        def routes(kind: CollectiveKind, groups: Groups):
            return find_routes(cluster, kind, groups)

        @lru_cache(maxsize=1 << 16)
        def collective(kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
            return collective_seconds(cluster, kind, num_bytes, routes(kind, groups))

        self._kernel = kernel_like
        self._collective = collective

    def kernel(self, kernel: Kernel, /) -> float:
        return self._kernel(kernel.kind, kernel.flops, kernel.bytes, kernel.dtype, kernel.gemm)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        return self._collective(kind, num_bytes, groups)


@dataclass(frozen=True, slots=True)
class BandwidthOnly:
    """A toy cluster without latency, every device with the same bandwidth to every other: planners are easy to check on it.

    Attributes:
        bandwidth: bytes per second that each device sends.
        flop_per_s: speed of all arithmetic; infinite makes compute free.
    """

    bandwidth: float = 1e9
    flop_per_s: float = inf

    def kernel(self, kernel: Kernel, /) -> float:
        return kernel.flops / self.flop_per_s

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        size = max(len(set(group)) for group in groups)  # a device that sends to itself is alone
        return sent_fraction(kind, size) * num_bytes / self.bandwidth if size > 1 else 0.0
