"""Network topology: the rings of groups of devices, and contention for links and ports.

A ring passes each host once. Its devices in a host reach other hosts through their NICs; groups
that use a NIC at the same time share it. `simulator.costs.collective_model` computes the costs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from simulator.hardware.cluster import Cluster
from simulator.work import CollectiveKind, Groups


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of a group: the numbers that the cost of a collective depends on.

    Attributes:
        size: devices of the group.
        hosts: hosts with devices of the group.
        per_host: largest number of its devices in one host.
        nics: smallest number of NICs of the group in one host. A NIC counts as 1 / number of groups
            that use it.
        oversubscription: factor by which it gets less bandwidth between leaf switches; 1 if it
            stays on one switch, or on one of each rail.
        per_pod: smallest number of its devices in one pod; 0 where `oversubscription` is 1.
        ports: ports of a host that the group has where it goes from one to another; a port counts
            as 1 / number of groups that leave it.
        per_port: largest number of its devices at one port that it leaves; 0 where it leaves none.
    """

    size: int
    hosts: int
    per_host: int
    nics: float
    oversubscription: float = 1.0
    per_pod: int = 0
    ports: float = 1.0
    per_port: int = 0


@dataclass(frozen=True, slots=True)
class Flows:
    """Contention among the messages of a collective_permute.

    Attributes:
        within: largest number of messages into or out of one device (or port) within a host.
        across: largest number of messages into or out of one NIC between hosts.
        members: largest number of devices of one host that send or receive within it.
    """

    within: float
    across: float
    members: int = 2


Routes = frozenset[Ring] | Flows


def find_routes(cluster: Cluster, kind: CollectiveKind, groups: Groups) -> Routes:
    """Return the different rings that groups of devices form while all of them communicate.

    Args:
        cluster: the cluster with the devices.
        kind: the kind of the collective.
        groups: device ids of each group; for a collective_permute: pairs of source and target.

    Returns:
        The rings, or the flows of a collective_permute.

    Raises:
        ValueError: there are no groups.
        ClusterError: a device is not in the cluster.
    """
    if not groups:
        raise ValueError(
            f"{kind} without groups; expected the device ids that communicate, e.g. ((0, 1), (2, "
            "3))"
        )
    return _flows(cluster, groups) if kind == "collective_permute" else _rings(cluster, groups)


def strided_ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """Return the ring that `find_routes` finds for all groups of `size` devices with a stride.

    The closed form costs the same for every number of devices. Where groups don't fill hosts or
    leaf switches evenly, as 64 devices in hosts of 72, it is the ring of the group with the fewest
    NICs.

    Args:
        cluster: the cluster with the devices.
        size: devices of each group.
        stride: difference between the ids of neighbours in a group.
    """
    local = cluster.devices_per_host
    if size * stride <= local and local % (size * stride) == 0:
        return _at_ports(cluster, Ring(size, 1, size, cluster.nics_per_host * size / local), stride)
    per_host = max(1, local // stride)
    if (local % stride and stride % local) or size % per_host:
        return _uneven_ring(cluster, size, stride)
    ring = Ring(size, size // per_host, per_host, cluster.nics_per_host * per_host / local)
    host_stride = max(1, stride // local)
    pod = cluster.hosts_per_switch or cluster.hosts
    span = host_stride * ring.hosts
    if cluster.oversubscription > 1 and cluster.hosts > pod and pod % span:
        if span % pod or (pod % host_stride and host_stride % pod):
            return _uneven_ring(cluster, size, stride)
        per_pod = per_host * max(1, min(ring.hosts, pod // host_stride))
        ring = replace(ring, oversubscription=cluster.oversubscription, per_pod=per_pod)
    return _at_ports(cluster, ring, stride)


_MOST_DEVICES = 4608
"""Devices whose groups `_uneven_ring` looks at, unless one group has more."""


def _uneven_ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """Return the ring with the fewest NICs among groups that don't fill hosts evenly.

    Their places in hosts, and on leaf switches with less bandwidth between them, recur after the
    least common multiple of a group's span and a host, or the hosts of a switch.
    """
    span = size * stride
    period = cluster.devices_per_host
    if cluster.oversubscription > 1:
        period *= cluster.hosts_per_switch or 1
    blocks = lcm(span, period) // span
    blocks = max(1, min(blocks, cluster.num_devices // span, _MOST_DEVICES // span))
    groups = tuple(
        tuple(range(block * span + offset, (block + 1) * span, stride))
        for block in range(blocks)
        for offset in range(stride)
    )
    rings = _rings(_large_enough(cluster, blocks * span), groups)
    return min(
        rings, key=lambda ring: (ring.nics / ring.oversubscription, ring.per_pod, -ring.hosts)
    )


def _large_enough(cluster: Cluster, devices: int) -> Cluster:
    if devices <= cluster.num_devices:
        return cluster
    return cluster.with_size(-(-devices // cluster.devices_per_host))


def _at_ports(cluster: Cluster, ring: Ring, stride: int) -> Ring:
    """Return the ring of groups that fill hosts, with `ports` and `per_port`."""
    if cluster.bridges_per_host is None or ring.per_host == 1:
        return ring
    span = ring.per_host * stride
    starts = [
        first + offset
        for first in range(0, cluster.devices_per_host - span + 1, span)
        for offset in range(stride)
    ]
    groups = [range(start, start + span, stride) for start in starts]
    users = _port_users(cluster, groups)
    ports, per_port = min(_ports(cluster, group, users) for group in groups)
    return replace(ring, ports=ports, per_port=per_port)


def _rings(cluster: Cluster, groups: Groups) -> frozenset[Ring]:
    """Return the different rings of groups that communicate at the same time."""
    users = Counter(nic for group in groups for nic in {cluster.nic_of(device) for device in group})
    ports = Counter() if cluster.bridges_per_host is None else _port_users(cluster, groups)
    return frozenset(_ring(cluster, group, users, ports) for group in groups)


def _ring(
    cluster: Cluster, group: Sequence[int], users: Counter[int], at_ports: Counter[int]
) -> Ring:
    """Return the ring of a group, given the number of groups that use each NIC and each port."""
    members = Counter(cluster.host_of(device) for device in group)
    nics = dict.fromkeys(members, 0.0)
    for nic in {cluster.nic_of(device) for device in group}:
        nics[nic // cluster.nics_per_host] += cluster.nics_per_device / users[nic]
    ring = Ring(sum(members.values()), len(members), max(members.values()), min(nics.values()))
    if cluster.oversubscription > 1 and (per_pod := _per_pod(cluster, group)):
        ring = replace(ring, oversubscription=cluster.oversubscription, per_pod=per_pod)
    if cluster.bridges_per_host is not None:
        ports, per_port = _ports(cluster, group, at_ports)
        ring = replace(ring, ports=ports, per_port=per_port)
    return ring


def _per_pod(cluster: Cluster, group: Iterable[int]) -> int:
    """Return `Ring.per_pod` of a group, 0 if it leaves no leaf switch but along rails."""
    pods = Counter[int]()
    rails: defaultdict[int, set[int]] = defaultdict(set)  # by host
    for device in group:
        host = cluster.host_of(device)
        pods[cluster.pod_of(host)] += 1
        rails[host].add(cluster.leaf_of(device)[1])
    same_rails = len(set(map(frozenset, rails.values()))) == 1
    return 0 if len(pods) == 1 and same_rails else min(pods.values())


def _port_users(cluster: Cluster, groups: Iterable[Iterable[int]]) -> Counter[int]:
    """Return how many groups go from each port to another one of its host."""
    return Counter(port for group in groups for port in _left(cluster, group))


def _left(cluster: Cluster, group: Iterable[int]) -> dict[int, int]:
    """Return the ports that a group leaves for others of the host, with its devices at each."""
    members = Counter(map(cluster.bridge_of, group))
    at_host = Counter(port // (cluster.bridges_per_host or 1) for port in members)
    return {
        port: count
        for port, count in members.items()
        if at_host[port // (cluster.bridges_per_host or 1)] > 1
    }


def _ports(cluster: Cluster, group: Iterable[int], users: Counter[int]) -> tuple[float, int]:
    """Return `Ring.ports` and `Ring.per_port` of a group."""
    left = _left(cluster, group)
    return 1 / max((users[port] for port in left), default=1), max(left.values(), default=0)


def _flows(cluster: Cluster, pairs: Groups) -> Flows:
    """Return the contention among messages; a message to its own source is ignored."""
    within: Counter[tuple[str, int]] = Counter()
    across: Counter[tuple[str, int]] = Counter()
    upward: Counter[tuple[str, int]] = Counter()
    ports: Counter[tuple[str, int]] = Counter()
    members: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in pairs:
        if source == target:
            continue
        if (host := cluster.host_of(source)) == cluster.host_of(target):
            within.update((("out", source), ("in", target)))
            members[host] |= {source, target}
            if cluster.bridge_of(source) != cluster.bridge_of(target):
                ports.update(
                    (("out", cluster.bridge_of(source)), ("in", cluster.bridge_of(target)))
                )
        else:
            nics = ("out", cluster.nic_of(source)), ("in", cluster.nic_of(target))
            across.update(nics)
            if cluster.leaf_of(source) != cluster.leaf_of(target):
                upward.update(nics)
    most_members = max(map(len, members.values()), default=2)
    near = max(max(within.values(), default=0), max(ports.values(), default=0))
    far = max(
        max(across.values(), default=0), cluster.oversubscription * max(upward.values(), default=0)
    )
    return Flows(near, far / cluster.nics_per_device, most_members)
