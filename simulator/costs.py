"""Cost models: what turns work into seconds. The planner and the engine ask the same one."""

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from simulator.cluster import Cluster
from simulator.compute import kernel_seconds
from simulator.network import collective_seconds, find_routes, sent_fraction
from simulator.work import CollectiveKind, Groups, Kernel


class CostModel(Protocol):
    """Seconds of work on one cluster."""

    def kernel(self, kernel: Kernel) -> float:
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
        self._kernel = lru_cache(maxsize=1 << 16)(lambda kernel: kernel_seconds(cluster.device, kernel))
        self._routes = lru_cache(maxsize=1 << 12)(lambda kind, groups: find_routes(cluster, kind, groups))
        self._collective = lru_cache(maxsize=1 << 16)(
            lambda kind, num_bytes, groups: collective_seconds(cluster, kind, num_bytes, self._routes(kind, groups))
        )

    def kernel(self, kernel: Kernel) -> float:
        return self._kernel(replace(kernel, name=""))  # kernels that differ by name only cost the same

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        return self._collective(kind, num_bytes, groups)


class BandwidthOnly:
    """A toy cluster without latency, every device with the same bandwidth to every other: planners are easy to check on it.

    Args:
        bandwidth: bytes per second that each device sends.
        flops_per_s: speed of every kernel with FLOP; infinite makes compute free.
    """

    def __init__(self, bandwidth: float = 1e9, flops_per_s: float = float("inf")) -> None:
        self.bandwidth = bandwidth
        self.flops_per_s = flops_per_s

    def kernel(self, kernel: Kernel) -> float:
        return kernel.flops / self.flops_per_s

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        return max(
            (
                sent_fraction(kind, len(set(group))) * num_bytes / self.bandwidth
                for group in groups
                if len(set(group)) > 1
            ),
            default=0.0,
        )
