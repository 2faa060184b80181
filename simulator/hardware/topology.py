"""Network topology: the rings that groups of devices form, and the messages that share a link or a port.

A ring passes each host once. Its devices there reach other hosts through the cards they are attached to; a card that several groups
use at the same time is divided among them. `simulator.costs.collective_model` says what that costs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.work import CollectiveKind, Groups


@dataclass(frozen=True, slots=True)
class Ring:
    """What the cost of a group depends on.

    Attributes:
        size: its devices.
        hosts: hosts they sit in.
        per_host: devices in the host that has most of them.
        nics: network cards the group has in the host that has fewest, each counted as 1 / number of groups that use it.
        slower: how many times less bandwidth it has between leaf switches; 1 if it stays on one, or on one of each rail.
        per_pod: its devices in the hosts of the leaf switch that has fewest of them; 0 where `slower` is 1.
        ports: ports of a host the group has where it goes from one to another, counted as 1 / number of groups that do so there.
        per_port: its devices at the port that has most of them; 0 where it leaves none.
    """

    size: int
    hosts: int
    per_host: int
    nics: float
    slower: float = 1.0
    per_pod: int = 0
    ports: float = 1.0
    per_port: int = 0


@dataclass(frozen=True, slots=True)
class Flows:
    """Messages of a collective_permute that meet.

    Attributes:
        within: most of them into or out of one device within a host.
        across: most of them into or out of one card between hosts.
        members: devices of a host that send or receive within it, where most do.
    """

    within: float
    across: float
    members: int = 2


Routes = frozenset[Ring] | Flows


def find_routes(cluster: Cluster, kind: CollectiveKind, groups: Groups) -> Routes:
    """The different rings (or the flows of a collective_permute) that `groups` form on `cluster`, all at the same time."""
    if not groups:
        raise ValueError(
            f"{kind} without groups; expected the device ids that communicate, e.g. ((0, 1), (2, 3))"
        )
    return _flows(cluster, groups) if kind == "collective_permute" else _rings(cluster, groups)


def strided_ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """As `find_routes` of all groups of `size` devices that are `stride` apart, in closed form.

    Groups must fill hosts evenly: sizes and strides that divide the devices of a host or are multiples of it.
    """
    local = cluster.devices_per_host
    if size * stride <= local:
        return _at_ports(cluster, Ring(size, 1, size, cluster.nics_per_host * size / local), stride)
    per_host = max(1, local // stride)
    if (local % stride and stride % local) or size % per_host:
        raise ClusterError(
            f"groups of {size} devices that are {stride} apart don't fill hosts of {local} devices evenly; "
            "choose degrees of parallelism that divide the devices of a host or are multiples of it"
        )
    ring = Ring(size, size // per_host, per_host, cluster.nics_per_host * per_host / local)
    apart = max(1, stride // local)  # hosts from one to the next
    pod, span = cluster.hosts_per_switch or cluster.hosts, apart * ring.hosts
    if cluster.oversubscription > 1 and cluster.hosts > pod and (span > pod or pod % span):
        per_pod = per_host * max(1, min(ring.hosts, pod // apart))
        ring = replace(ring, slower=cluster.oversubscription, per_pod=per_pod)
    return _at_ports(cluster, ring, stride)


def _at_ports(cluster: Cluster, ring: Ring, stride: int) -> Ring:
    """The ring of groups that fill hosts, with what it has of their ports."""
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
    users = Counter(nic for group in groups for nic in {cluster.nic_of(device) for device in group})
    ports = Counter() if cluster.bridges_per_host is None else _port_users(cluster, groups)
    return frozenset(_ring(cluster, group, users, ports) for group in groups)


def _ring(
    cluster: Cluster, group: Sequence[int], users: Counter[int], at_ports: Counter[int]
) -> Ring:
    members = Counter(cluster.host_of(device) for device in group)
    nics = dict.fromkeys(members, 0.0)
    for nic in {cluster.nic_of(device) for device in group}:
        nics[nic // cluster.nics_per_host] += cluster.nics_per_device / users[nic]
    ring = Ring(sum(members.values()), len(members), max(members.values()), min(nics.values()))
    if cluster.oversubscription > 1 and (per_pod := _per_pod(cluster, group)):
        ring = replace(ring, slower=cluster.oversubscription, per_pod=per_pod)
    if cluster.bridges_per_host is not None:
        ports, per_port = _ports(cluster, group, at_ports)
        ring = replace(ring, ports=ports, per_port=per_port)
    return ring


def _per_pod(cluster: Cluster, group: Iterable[int]) -> int:
    """Devices of the group in the hosts of the leaf switch that has fewest of them; 0 if it stays on one, or on one of each rail."""
    pods, of_host = Counter[int](), defaultdict[int, set[int]](set)
    for device in group:
        host = cluster.host_of(device)
        pods[cluster.pod_of(host)] += 1
        of_host[host].add(cluster.leaf_of(device)[1])
    along = len(set(map(frozenset, of_host.values()))) == 1  # every host has it on the same rails
    return 0 if len(pods) == 1 and along else min(pods.values())


def _port_users(cluster: Cluster, groups: Iterable[Iterable[int]]) -> Counter[int]:
    """How many groups go from each port to another one of its host."""
    return Counter(port for group in groups for port in _left(cluster, group))


def _left(cluster: Cluster, group: Iterable[int]) -> dict[int, int]:
    """The ports that a group leaves for others of the host, and how many of its devices are at each."""
    members = Counter(map(cluster.bridge_of, group))
    at_host = Counter(port // (cluster.bridges_per_host or 1) for port in members)
    return {
        port: count
        for port, count in members.items()
        if at_host[port // (cluster.bridges_per_host or 1)] > 1
    }


def _ports(cluster: Cluster, group: Iterable[int], users: Counter[int]) -> tuple[float, int]:
    """`Ring.ports` and `Ring.per_port` of a group."""
    left = _left(cluster, group)
    return 1 / max((users[port] for port in left), default=1), max(left.values(), default=0)


def _flows(cluster: Cluster, pairs: Groups) -> Flows:
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
            cards = ("out", cluster.nic_of(source)), ("in", cluster.nic_of(target))
            across.update(cards)
            if cluster.leaf_of(source) != cluster.leaf_of(target):
                upward.update(cards)
    most = max(map(len, members.values()), default=2)
    near = max(max(within.values(), default=0), max(ports.values(), default=0))
    far = max(
        max(across.values(), default=0), cluster.oversubscription * max(upward.values(), default=0)
    )
    return Flows(near, far / cluster.nics_per_device, most)
