"""Cost models: what turns work into seconds. The planner and the engine ask the same one."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Protocol

from simulator.costs.collective_model import Network
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.collective_profile import sent_fraction
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster
from simulator.hardware.topology import Flows, find_routes
from simulator.spans import Link
from simulator.work import Collective, CollectiveKind, Groups, Kernel


class CostModel(Protocol):
    """Seconds of work on one cluster."""

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Seconds that a kernel occupies the compute stream of a device (an id in the cluster)."""
        ...

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Seconds of a collective whose `groups` (ids in the cluster) all communicate at once.

        `num_bytes` counts as in `simulator.work.Collective`.
        """
        ...

    def contention_factor(self, groups: Groups) -> float:
        """How many times longer a collective of these groups, and computation beside it, take while both go on."""
        ...

    def link(self, groups: Groups) -> Link:
        """What these groups communicate over, one collective after the other."""
        ...

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """The network cards that messages along these pairs pass, in and out, and what part of the time of each they take.

        It is 1 for the card that sets the pace. Empty where they pass none, or where cards are not taken to be shared.
        """
        ...


def kernel_seconds(costs: CostModel, kernel: Kernel, device: int = 0) -> float:
    """What a kernel takes: as it says itself, or else the costs."""
    return costs.kernel(kernel, device) if kernel.seconds is None else kernel.seconds


def collective_seconds(costs: CostModel, collective: Collective, groups: Groups) -> float:
    """What a collective takes between `groups`, in ids of the cluster: as it says itself, or else the costs."""
    known = collective.seconds
    return (
        costs.collective(collective.kind, collective.num_bytes, groups) if known is None else known
    )


class ClusterCosts:
    """Costs on a described cluster (`simulator.costs.kernel_model`, `simulator.costs.collective_model`); answers are remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kernels = kernels = KernelModel(cluster.device)
        self.network = network = Network(cluster)

        @lru_cache(maxsize=1 << 16)
        def kernel_like(kind, flops, num_bytes, dtype, gemm) -> float:  # whatever its name
            return kernels.seconds(Kernel("", kind, flops, num_bytes, dtype, gemm))

        @lru_cache(maxsize=1 << 12)
        def routes(kind: CollectiveKind, groups: Groups):
            return find_routes(cluster, kind, groups)

        @lru_cache(maxsize=1 << 16)
        def collective(kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
            return network.collective_seconds(kind, num_bytes, routes(kind, groups))

        @lru_cache(maxsize=1 << 12)
        def link(groups: Groups) -> Link:
            return _link(cluster, groups)

        @lru_cache(maxsize=1 << 12)
        def nics(pairs: Groups) -> Mapping[Hashable, float]:
            return _nic_loads(cluster, pairs)

        self._kernel = kernel_like
        self._link = link
        self._nics = nics
        self._collective = collective

    @property
    def pools(self) -> "tuple[ClusterCosts, ...]":
        """Costs of each pool of the cluster, which is one."""
        return (self,)

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        return self._kernel(kernel.kind, kernel.flops, kernel.bytes, kernel.dtype, kernel.gemm)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        return self._collective(kind, num_bytes, groups)

    def contention_factor(self, groups: Groups) -> float:
        return self.network.link(self._link(groups) == "between hosts").contention_factor

    def link(self, groups: Groups) -> Link:
        return self._link(groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return self._nics(pairs)


class HeterogeneousCosts:
    """Costs on a cluster of several pools: what happens within one costs what it does there.

    Only messages cross from pool to pool. Each passes a network card of either; the card that is busy longest sets the pace.

    Attributes:
        pools: costs of each pool by itself, its devices counted from 0.
    """

    def __init__(self, cluster: HeterogeneousCluster) -> None:
        self.cluster = cluster
        self.pools = tuple(map(ClusterCosts, cluster.pools))
        self._collective = lru_cache(maxsize=1 << 16)(self._collective_anew)

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        return self.pools[self.cluster.pool_of((device,))].kernel(kernel)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """As `CostModel.collective`. Groups over several pools, other than the pairs of a collective_permute: `ClusterError`."""
        return self._collective(kind, num_bytes, groups)

    def contention_factor(self, groups: Groups) -> float:
        """As `CostModel.contention_factor`. Groups over several pools: `ClusterError`."""
        devices = [device for group in groups for device in group]
        pool = self.cluster.pool_of(devices)
        start = self.cluster.pool_starts[pool]
        return self.pools[pool].contention_factor(
            tuple(tuple(device - start for device in group) for group in groups)
        )

    def link(self, groups: Groups) -> Link:
        return _link(self.cluster, groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return _nic_loads(self.cluster, pairs)

    def _collective_anew(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        inside: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # groups of each pool
        cards: Counter[tuple[int, str, int]] = (
            Counter()
        )  # messages out of and into each network card of each pool
        for group in groups:
            of_members = [self.cluster.pool_of((device,)) for device in group]
            local = [
                device - self.cluster.pool_starts[pool]
                for device, pool in zip(group, of_members, strict=True)
            ]
            if kind != "collective_permute" or len(set(of_members)) == 1:
                inside[self.cluster.pool_of(group)].append(tuple(local))
            else:
                for pool, device, way in zip(of_members, local, ("out", "in"), strict=True):
                    cards[pool, way, self.cluster.pools[pool].nic_of(device)] += 1
        seconds = [
            self.pools[pool].collective(kind, num_bytes, tuple(each))
            for pool, each in inside.items()
        ]
        for (pool, *_), messages in cards.items():
            of_card = Flows(0, messages / self.cluster.pools[pool].nics_per_device)
            seconds.append(self.pools[pool].network.collective_seconds(kind, num_bytes, of_card))
        return max(seconds)


def _link(cluster: AnyCluster, groups: Groups) -> Link:
    far = any(len(set(map(cluster.host_of, group))) > 1 for group in groups)
    return "between hosts" if far else "within hosts"


def _nic_loads(cluster: AnyCluster, pairs: Groups) -> Mapping[Hashable, float]:
    busy: defaultdict[Hashable, float] = defaultdict(float)
    for source, target in pairs:
        if cluster.host_of(source) != cluster.host_of(target):
            upward = _goes_up(cluster, source, target)
            for way, device in (("out", source), ("in", target)):
                number = cluster.pool_of((device,))
                pool = cluster.pools[number]
                nic = pool.nic_of(device - cluster.pool_starts[number])
                assert pool.inter_host is not None  # else there were no other hosts
                seconds = 1 / (pool.inter_host.bandwidth_gb_per_s * pool.nics_per_device)
                busy[number, way, nic] += seconds
                if upward:
                    busy[number, f"{way} of the switch", nic] += pool.oversubscription * seconds
    most = max(busy.values(), default=1.0)
    return {card: each / most for card, each in busy.items()}


def _goes_up(cluster: AnyCluster, source: int, target: int) -> bool:
    """Whether a message goes between leaf switches that have less bandwidth upwards; pools are not taken to."""
    number = cluster.pool_of((source,))
    if number != cluster.pool_of((target,)) or cluster.pools[number].oversubscription == 1:
        return False
    start = cluster.pool_starts[number]
    return cluster.pools[number].leaf_of(source - start) != cluster.pools[number].leaf_of(
        target - start
    )


def costs_of(cluster: AnyCluster) -> ClusterCosts | HeterogeneousCosts:
    """The costs that a described cluster implies."""
    return ClusterCosts(cluster) if isinstance(cluster, Cluster) else HeterogeneousCosts(cluster)


@dataclass(frozen=True, slots=True)
class BandwidthOnly:
    """A toy cluster without latency, every device with the same bandwidth to every other: planners are easy to check on it.

    Attributes:
        bandwidth: bytes per second that each device sends.
        flop_per_s: speed of all arithmetic; infinite makes compute free.
    """

    bandwidth: float = 1e9
    flop_per_s: float = inf

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        return kernel.flops / self.flop_per_s

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        size = max(len(set(group)) for group in groups)  # a device that sends to itself is alone
        return sent_fraction(kind, size) * num_bytes / self.bandwidth if size > 1 else 0.0

    def contention_factor(self, groups: Groups) -> float:
        return 1.0

    def link(self, groups: Groups) -> Link:
        return "within hosts"

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return {}
