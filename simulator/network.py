"""Who meets whom on the network: the rings that groups of devices form, and the messages that share a link.

A ring passes each host once. Its devices there reach other hosts through the cards they are attached to; a card that several groups
use at the same time is divided among them. `simulator.collectives` says what that costs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from simulator.cluster import Cluster
from simulator.description import ClusterError
from simulator.work import CollectiveKind, Groups


@dataclass(frozen=True, slots=True)
class Ring:
    """What the cost of a group depends on.

    Attributes:
        size: its devices.
        hosts: hosts they sit in.
        per_host: devices in the host that has most of them.
        nics: network cards the group has in the host that has fewest, each counted as 1 / number of groups that use it.
    """

    size: int
    hosts: int
    per_host: int
    nics: float


@dataclass(frozen=True, slots=True)
class Flows:
    """Messages of a permute that meet.

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
    """The different rings (or the flows of a permute) that `groups` form on `cluster`, all at the same time."""
    if not groups:
        raise ValueError(f"{kind} without groups; expected the device ids that communicate, e.g. ((0, 1), (2, 3))")
    return _flows(cluster, groups) if kind == "permute" else _rings(cluster, groups)


def strided_ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """As `find_routes` of all groups of `size` devices that are `stride` apart, in closed form.

    Groups must fill hosts evenly: sizes and strides that divide the devices of a host or are multiples of it.
    """
    local = cluster.devices_per_host
    if size * stride <= local:
        return Ring(size, 1, size, cluster.nics_per_host * size / local)
    per_host = max(1, local // stride)
    if (local % stride and stride % local) or size % per_host:
        raise ClusterError(
            f"groups of {size} devices that are {stride} apart don't fill hosts of {local} devices evenly; "
            "choose degrees of parallelism that divide the devices of a host or are multiples of it"
        )
    return Ring(size, size // per_host, per_host, cluster.nics_per_host * per_host / local)


def _rings(cluster: Cluster, groups: Groups) -> frozenset[Ring]:
    users = Counter(nic for group in groups for nic in {cluster.nic_of(device) for device in group})
    return frozenset(_ring(cluster, group, users) for group in groups)


def _ring(cluster: Cluster, group: Iterable[int], users: Counter[int]) -> Ring:
    members = Counter(cluster.host_of(device) for device in group)
    nics = dict.fromkeys(members, 0.0)
    for nic in {cluster.nic_of(device) for device in group}:
        nics[nic // cluster.nics_per_host] += cluster.cards_per_device / users[nic]
    return Ring(sum(members.values()), len(members), max(members.values()), min(nics.values()))


def _flows(cluster: Cluster, pairs: Groups) -> Flows:
    within: Counter[tuple[str, int]] = Counter()
    across: Counter[tuple[str, int]] = Counter()
    members: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in pairs:
        if source == target:
            continue
        if (host := cluster.host_of(source)) == cluster.host_of(target):
            within.update((("out", source), ("in", target)))
            members[host] |= {source, target}
        else:
            across.update((("out", cluster.nic_of(source)), ("in", cluster.nic_of(target))))
    most = max(map(len, members.values()), default=2)
    return Flows(max(within.values(), default=0), max(across.values(), default=0) / cluster.cards_per_device, most)
