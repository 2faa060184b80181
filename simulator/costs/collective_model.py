"""Seconds of collectives on a cluster, by the algorithm that is fastest: rings, trees, and the reductions of the switch.

A ring over n devices moves each byte of the array past n - 1 of them, so each device sends (n - 1) / n of the array (twice for an
all_reduce) and the slowest link of the ring sets the pace:

    launch + latency of the hops + max over links of (S + sqrt(S * S_half)) / bandwidth

It is good for long messages. Across hosts an all_reduce may go up and down two trees of hosts instead, whose depth is a logarithm of
their number; each link then carries twice the array. As in NCCL (src/graph/tuning.cc) trees reach 0.92 of the bandwidth of rings.
Where the switch adds (NVLS), each device sends its array once and gets the sum; across hosts (NVLSTree) the switches' sums go up and
down the trees, once each way between two hosts. Only all_reduces are taken to do so: of other kinds there are no measurements that tell.

What goes between leaf switches gets `Cluster.oversubscription` times less bandwidth, whoever else sends. On rails it stays with the card
it starts from: rings go from each host to the same cards of the next, and an all_to_all brings what is for other rails to their cards
within the host (NCCL's PXN); messages go to the card of the device they are for. Ports that devices of a host share (`bridges_per_host`)
are divided among the groups that leave them, as cards are.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.collective_profile import (
    CollectiveProfile,
    SizeCurve,
    SwitchCurve,
    sent_fraction,
    transfer_seconds,
)
from simulator.hardware.topology import Flows, Ring, Routes, strided_ring
from simulator.work import CollectiveKind

_TREE_EFFICIENCY = 0.92


@dataclass(frozen=True)
class Network:
    """What collectives cost on a cluster."""

    cluster: Cluster

    @cached_property
    def curves(self) -> CollectiveProfile:
        """Collectives within a host."""
        return self.cluster.curves

    def ring(self, size: int, stride: int = 1) -> Ring:
        """The ring of `size` devices that are `stride` apart, where all devices of the cluster form such groups at the same time."""
        return strided_ring(self.cluster, size, stride)

    def link(self, far: bool) -> Link:
        """What devices of one host communicate over, or of several."""
        inter = self.cluster.inter_host
        return inter if far and inter is not None else self.cluster.intra_host

    def collective_seconds(self, kind: CollectiveKind, num_bytes: float, routes: Routes) -> float:
        """Seconds until the slowest group has finished; 0 where nobody has a partner."""
        if isinstance(routes, Flows):
            return self._permute_seconds(num_bytes, routes)
        return max(self.seconds(kind, num_bytes, ring) for ring in routes)

    def seconds(self, kind: CollectiveKind, num_bytes: float, ring: Ring) -> float:
        """Seconds of a collective of one group; 0 for a group of one."""
        return (
            min(self.seconds_by_algorithm(kind, num_bytes, ring).values()) if ring.size > 1 else 0.0
        )

    def seconds_by_algorithm(
        self, kind: CollectiveKind, num_bytes: float, ring: Ring
    ) -> dict[str, float]:
        """Seconds of a collective of one group by each algorithm that NCCL has for it, which takes the fastest."""
        curve, nvls, inter = self.curves.curve(kind), self.curves.nvls, self.cluster.inter_host
        if ring.hosts == 1 or inter is None:
            sent = sent_fraction(kind, ring.size) * num_bytes
            seconds = {
                "ring": curve.latency(kind, ring.size) + _within(kind, num_bytes, sent, ring, curve)
            }
            if kind == "all_reduce" and nvls is not None:
                seconds["nvls"] = nvls.seconds(num_bytes, ring.size)
            return seconds
        seconds = {"ring": _ring_seconds(kind, num_bytes, ring, curve, inter)}
        if kind == "all_reduce":
            seconds["tree"] = _tree_seconds(num_bytes, ring, curve, inter)
            if nvls is not None and ring.per_host > 1:
                seconds["nvls_tree"] = _nvls_tree_seconds(num_bytes, ring, nvls, inter)
        return seconds

    def send_seconds(self, num_bytes: float, stride: int) -> float:
        """Seconds of a message to the device `stride` further on, while all devices send one."""
        cluster, local = self.cluster, self.cluster.devices_per_host
        if stride < local or cluster.inter_host is None:
            at_port = local // (cluster.bridges_per_host or local)
            return self._permute_seconds(num_bytes, Flows(within=min(stride, at_port), across=0))
        leaves = (
            cluster.pod_of(cluster.hosts - 1) > 0
            or cluster.leaf_of(0)[1] != cluster.leaf_of(stride % local)[1]
        )
        slower = cluster.oversubscription if leaves else 1.0
        return self._permute_seconds(num_bytes, Flows(0, slower * local / cluster.nics_per_host))

    def _permute_seconds(self, num_bytes: float, flows: Flows) -> float:
        curve = self.curves.curve("collective_permute")
        within = (
            curve.seconds("collective_permute", num_bytes * flows.within, flows.members)
            if flows.within
            else 0.0
        )
        inter = self.cluster.inter_host
        if inter is None or not flows.across:
            return within
        latency = (self.cluster.collective_launch_us + inter.latency_us) * 1e-6
        return max(within, latency + _over_cards(num_bytes * flows.across, inter, 1.0))


def _ring_seconds(
    kind: CollectiveKind, num_bytes: float, ring: Ring, curve: SizeCurve, inter: Link
) -> float:
    """Seconds round a ring over several hosts."""
    sent = sent_fraction(kind, ring.size) * num_bytes
    cards = _over_cards(sent, inter, ring.nics / ring.oversubscription)
    hops = curve.hop_us * (ring.size - ring.hosts) + inter.latency_us * ring.hosts
    if (
        kind == "all_to_all"
    ):  # no ring: each device of the host sends over the network what is for the other hosts
        each = ring.per_host * num_bytes / ring.size
        cards = _over_cards(each * (ring.size - ring.per_host), inter, ring.nics)
        if ring.oversubscription > 1:
            cards = max(
                cards,
                _over_cards(
                    each * (ring.size - max(ring.per_host, ring.per_pod)),
                    inter,
                    ring.nics / ring.oversubscription,
                ),
            )
        hops = max(curve.hop_us, inter.latency_us)
    latency = curve.start(ring.per_host) + hops * (2 if kind == "all_reduce" else 1)
    return latency * 1e-6 + max(_within(kind, num_bytes, sent, ring, curve), cards)


def _tree_seconds(num_bytes: float, ring: Ring, curve: SizeCurve, inter: Link) -> float:
    """Seconds of an all_reduce up and down two trees of hosts, each for half of the array; within a host, a chain of its devices."""
    moved = 2 * num_bytes / _TREE_EFFICIENCY
    hops = curve.hop_us * (ring.per_host - 1) + inter.latency_us * ceil(log2(ring.hosts))
    within, across = (
        _within("all_reduce", num_bytes, moved, ring, curve),
        _over_cards(moved, inter, ring.nics / ring.oversubscription),
    )
    return (curve.start(ring.per_host) + 2 * hops) * 1e-6 + max(within, across)


def _nvls_tree_seconds(num_bytes: float, ring: Ring, nvls: SwitchCurve, inter: Link) -> float:
    """Seconds of an all_reduce in which the sums of the switches go up and down two trees of hosts."""
    moved = (1 if ring.hosts == 2 else 2) * num_bytes
    latency = nvls.launch_us + 2 * inter.latency_us * ceil(log2(ring.hosts))
    across = _over_cards(moved, inter, ring.nics / ring.oversubscription)
    return latency * 1e-6 + max(nvls.transfer(num_bytes, ring.per_host), across)


def _within(
    kind: CollectiveKind, num_bytes: float, sent: float, ring: Ring, curve: SizeCurve
) -> float:
    """Seconds in which each device sends so many bytes to the next one of its host, some of them from port to port."""
    if (
        kind == "all_to_all" and ring.per_port
    ):  # no ring: what a port's devices have for the others of the host leaves it at once
        sent = max(sent, ring.per_port * (ring.per_host - ring.per_port) / ring.size * num_bytes)
    return curve.transfer(sent / ring.ports, ring.per_host) if ring.per_host > 1 else 0.0


def _over_cards(num_bytes: float, inter: Link, cards: float) -> float:
    return transfer_seconds(
        num_bytes, inter.half_size_mb * 1e6, inter.bandwidth_gb_per_s * 1e9 * cards
    )
