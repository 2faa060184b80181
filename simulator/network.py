"""Seconds of collectives on a cluster: rings, within a host and across hosts.

A ring over n devices moves each byte of the array past n - 1 of them, so each device sends (n - 1) / n of the array (twice for an
all_reduce) and the slowest link of the ring sets the pace. With S bytes to send over a link of bandwidth B that needs S_half bytes
to reach half of it, the time is

    launch + latency * hops + (S + sqrt(S * S_half)) / B

Across hosts the ring passes each host once. Its devices there reach the network through the cards they are attached to; a card that
several groups use at the same time is divided among them.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from simulator.cluster import Cluster, Link
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
    """Messages of a permute that meet: most of them into or out of one device within a host, and one card between hosts."""

    within: int
    across: int


Routes = frozenset[Ring] | Flows


def sent_fraction(kind: CollectiveKind, size: int) -> float:
    """Bytes that each of `size` devices sends, per byte of the array (`Collective.num_bytes`)."""
    match kind:
        case "all_reduce":
            return 2 * (size - 1) / size
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (size - 1) / size
        case "permute":
            return 1.0
        case _:
            assert_never(kind)


def find_routes(cluster: Cluster, kind: CollectiveKind, groups: Groups) -> Routes:
    """The different rings (or the flows of a permute) that `groups` form on `cluster`, all at the same time."""
    if not groups:
        raise ValueError(f"{kind} without groups; expected the device ids that communicate, e.g. ((0, 1), (2, 3))")
    return _flows(cluster, groups) if kind == "permute" else _rings(cluster, groups)


def collective_seconds(cluster: Cluster, kind: CollectiveKind, num_bytes: float, routes: Routes) -> float:
    """Seconds until the slowest group has finished; 0 where nobody has a partner."""
    if isinstance(routes, Flows):
        return _permute_seconds(cluster, num_bytes, routes)
    return max(_ring_seconds(cluster, kind, num_bytes, ring) for ring in routes)


def _ring_seconds(cluster: Cluster, kind: CollectiveKind, num_bytes: float, ring: Ring) -> float:
    if ring.size == 1:
        return 0.0
    intra, inter = cluster.intra_host, cluster.inter_host
    within = across = sent_fraction(kind, ring.size) * num_bytes
    if kind == "all_to_all":  # no ring: each device of the host sends over the network what is for the other hosts
        across = ring.per_host * (ring.size - ring.per_host) / ring.size * num_bytes
    seconds = _transfer(intra, within, intra.bandwidth(ring.per_host)) if ring.per_host > 1 else 0.0
    if inter is not None and ring.hosts > 1:
        seconds = max(seconds, _transfer(inter, across, inter.bandwidth_gb_per_s * 1e9 * ring.nics))
    return (cluster.collective_launch_us + _latency_us(cluster, kind, ring)) * 1e-6 + seconds


def _latency_us(cluster: Cluster, kind: CollectiveKind, ring: Ring) -> float:
    """Hops of a chunk on its way round the ring; in an all_to_all everybody sends to everybody at once."""
    intra = cluster.intra_host.latency_us
    if cluster.inter_host is None or ring.hosts == 1:
        return {"all_reduce": 2 * (ring.size - 1), "all_to_all": 1}.get(kind, ring.size - 1) * intra
    inter = cluster.inter_host.latency_us
    once = (ring.size - ring.hosts) * intra + ring.hosts * inter
    return {"all_reduce": 2 * once, "all_to_all": max(intra, inter)}.get(kind, once)


def _permute_seconds(cluster: Cluster, num_bytes: float, flows: Flows) -> float:
    seconds = 0.0
    for link, count in ((cluster.intra_host, flows.within), (cluster.inter_host, flows.across)):
        if link is not None and count:
            moved = _transfer(link, num_bytes * count, link.bandwidth_gb_per_s * 1e9)
            seconds = max(seconds, (cluster.collective_launch_us + link.latency_us) * 1e-6 + moved)
    return seconds


def _transfer(link: Link, num_bytes: float, bandwidth: float) -> float:
    return (num_bytes + math.sqrt(num_bytes * link.half_size_mb * 1e6)) / bandwidth


def _rings(cluster: Cluster, groups: Groups) -> frozenset[Ring]:
    users = Counter(nic for group in groups for nic in {cluster.nic_of(device) for device in group})
    return frozenset(_ring(cluster, group, users) for group in groups)


def _ring(cluster: Cluster, group: Iterable[int], users: Counter[int]) -> Ring:
    members = Counter(cluster.host_of(device) for device in group)
    nics = dict.fromkeys(members, 0.0)
    for nic in {cluster.nic_of(device) for device in group}:
        nics[nic // cluster.nics_per_host] += 1 / users[nic]
    return Ring(sum(members.values()), len(members), max(members.values()), min(nics.values()))


def _flows(cluster: Cluster, pairs: Groups) -> Flows:
    within: Counter[tuple[str, int]] = Counter()
    across: Counter[tuple[str, int]] = Counter()
    for source, target in pairs:
        if source == target:
            continue
        if cluster.host_of(source) == cluster.host_of(target):
            within.update((("out", source), ("in", target)))
        else:
            across.update((("out", cluster.nic_of(source)), ("in", cluster.nic_of(target))))
    return Flows(max(within.values(), default=0), max(across.values(), default=0))
