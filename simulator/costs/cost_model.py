"""Cost models: the seconds of work. The planner and the event engine use the same one."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Protocol

from simulator.costs.collective_model import CollectiveModel
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster
from simulator.hardware.topology import Flows, find_routes
from simulator.spans import Link
from simulator.work import Collective, CollectiveKind, Groups, Kernel


class CostModel(Protocol):
    """The seconds of work on one cluster."""

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Return the seconds of a kernel on the compute stream of a device.

        Args:
            kernel: the kernel.
            device: an id in the cluster.
        """
        ...

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the seconds of a collective.

        Args:
            kind: the kind of collective.
            num_bytes: bytes, counted as in `simulator.work.Collective`.
            groups: ids in the cluster. All groups communicate at the same time.
        """
        ...

    def contention_factor(self, groups: Groups) -> float:
        """Return the contention factor of a collective of these groups and of kernels beside it.

        While both run together, each takes this many times longer.
        """
        ...

    def link(self, groups: Groups) -> Link:
        """Return the class of links that these groups use, one collective after the other."""
        ...

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """Return the NICs that messages along these pairs pass, out and in.

        Returns:
            For each NIC, the part of its time that the messages take: 1 for the one that sets the
            pace. Empty if they pass no NIC, or if the model assumes that messages share none.
        """
        ...


def kernel_seconds(costs: CostModel, kernel: Kernel, device: int = 0) -> float:
    """Return the seconds that a kernel stores, or else those of the cost model."""
    return costs.kernel(kernel, device) if kernel.seconds is None else kernel.seconds


def collective_seconds(costs: CostModel, collective: Collective, groups: Groups) -> float:
    """Return the seconds that a collective stores, or else those of the cost model.

    Args:
        costs: the cost model.
        collective: the collective.
        groups: its groups in ids of the cluster.
    """
    if collective.seconds is not None:
        return collective.seconds
    return costs.collective(collective.kind, collective.num_bytes, groups)


class ClusterCosts:
    """The cost model of a `Cluster`, with a cache.

    It combines `simulator.costs.kernel_model` and `simulator.costs.collective_model`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kernels = kernels = KernelModel(cluster.device)
        self.network = network = CollectiveModel(cluster)

        @lru_cache(maxsize=1 << 16)
        def kernel(kind, flops, num_bytes, dtype, gemm) -> float:  # Kernels differ in their names.
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

        self._kernel = kernel
        self._link = link
        self._nics = nics
        self._collective = collective

    @property
    def pools(self) -> "tuple[ClusterCosts, ...]":
        """The cost models of the cluster's pools, of which it has one."""
        return (self,)

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Return the seconds of a kernel, which are the same on all devices."""
        return self._kernel(kernel.kind, kernel.flops, kernel.bytes, kernel.dtype, kernel.gemm)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the seconds of a collective, as `CostModel.collective`."""
        return self._collective(kind, num_bytes, groups)

    def contention_factor(self, groups: Groups) -> float:
        """Return the contention factor of the links that the groups use."""
        return self.network.link(self._link(groups) == "between hosts").contention_factor

    def link(self, groups: Groups) -> Link:
        """Return the class of links that the groups use."""
        return self._link(groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """Return the loads of the NICs that messages pass, as `CostModel.nics`."""
        return self._nics(pairs)


class HeterogeneousCosts:
    """The cost model of a cluster of several pools.

    Work within a pool costs what it costs there. Only messages cross from pool to pool. Each passes
    a NIC of both pools; the NIC that is busy longest sets the pace.

    Attributes:
        cluster: the cluster.
        pools: the cost model of each pool alone, whose devices count from 0.
    """

    def __init__(self, cluster: HeterogeneousCluster) -> None:
        self.cluster = cluster
        self.pools = tuple(map(ClusterCosts, cluster.pools))
        self._collective = lru_cache(maxsize=1 << 16)(self._collective_uncached)

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Return the seconds of a kernel on a device."""
        return self.pools[self.cluster.pool_of((device,))].kernel(kernel)

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the seconds of a collective, as `CostModel.collective`.

        Raises:
            ClusterError: a group is in several pools, and not a pair of a collective_permute.
        """
        return self._collective(kind, num_bytes, groups)

    def contention_factor(self, groups: Groups) -> float:
        """Return the contention factor in the pool of the groups.

        Raises:
            ClusterError: the groups are in several pools.
        """
        devices = [device for group in groups for device in group]
        pool = self.cluster.pool_of(devices)
        start = self.cluster.pool_starts[pool]
        return self.pools[pool].contention_factor(
            tuple(tuple(device - start for device in group) for group in groups)
        )

    def link(self, groups: Groups) -> Link:
        """Return the class of links that the groups use."""
        return _link(self.cluster, groups)

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """Return the loads of the NICs that messages pass, as `CostModel.nics`."""
        return _nic_loads(self.cluster, pairs)

    def _collective_uncached(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the seconds of a collective until the slowest pool has ended."""
        groups_within: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by pool
        messages_across: Counter[tuple[int, str, int]] = Counter()  # by pool, direction and NIC
        for group in groups:
            pools = [self.cluster.pool_of((device,)) for device in group]
            local = [
                device - self.cluster.pool_starts[pool]
                for device, pool in zip(group, pools, strict=True)
            ]
            if kind != "collective_permute" or len(set(pools)) == 1:
                groups_within[self.cluster.pool_of(group)].append(tuple(local))
            else:
                for pool, device, direction in zip(pools, local, ("out", "in"), strict=True):
                    messages_across[pool, direction, self.cluster.pools[pool].nic_of(device)] += 1
        seconds = [
            self.pools[pool].collective(kind, num_bytes, tuple(local_groups))
            for pool, local_groups in groups_within.items()
        ]
        for (pool, *_), messages in messages_across.items():
            flows = Flows(0, messages / self.cluster.pools[pool].nics_per_device)
            seconds.append(self.pools[pool].network.collective_seconds(kind, num_bytes, flows))
        return max(seconds)


def _link(cluster: AnyCluster, groups: Groups) -> Link:
    far = any(len(set(map(cluster.host_of, group))) > 1 for group in groups)
    return "between hosts" if far else "within hosts"


def _nic_loads(cluster: AnyCluster, pairs: Groups) -> Mapping[Hashable, float]:
    busy: defaultdict[Hashable, float] = defaultdict(float)
    for source, target in pairs:
        if cluster.host_of(source) != cluster.host_of(target):
            upward = _goes_up(cluster, source, target)
            for direction, device in (("out", source), ("in", target)):
                number = cluster.pool_of((device,))
                pool = cluster.pools[number]
                nic = pool.nic_of(device - cluster.pool_starts[number])
                assert pool.inter_host is not None  # A single host has no other hosts.
                seconds = 1 / (pool.inter_host.bandwidth_gb_per_s * pool.nics_per_device)
                busy[number, direction, nic] += seconds
                if upward:
                    switch = f"{direction} of the switch"
                    busy[number, switch, nic] += pool.oversubscription * seconds
    longest = max(busy.values(), default=1.0)
    return {nic: seconds / longest for nic, seconds in busy.items()}


def _goes_up(cluster: AnyCluster, source: int, target: int) -> bool:
    """Return whether a message passes oversubscribed links between leaf switches of a pool."""
    number = cluster.pool_of((source,))
    if number != cluster.pool_of((target,)) or cluster.pools[number].oversubscription == 1:
        return False
    start = cluster.pool_starts[number]
    return cluster.pools[number].leaf_of(source - start) != cluster.pools[number].leaf_of(
        target - start
    )


def costs_of(cluster: AnyCluster) -> ClusterCosts | HeterogeneousCosts:
    """Return the cost model of a cluster."""
    return ClusterCosts(cluster) if isinstance(cluster, Cluster) else HeterogeneousCosts(cluster)
