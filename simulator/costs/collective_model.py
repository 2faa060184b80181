"""Seconds of collectives by the fastest algorithm: ring, tree, or reduction in the switch.

A ring over n devices moves each byte of the array past n - 1 of them. Each device therefore sends
(n - 1) / n of the array, twice for an all_reduce, and the slowest link of the ring sets the pace:

    launch + latency of the hops + max over links of (S + sqrt(S * S_half)) / bandwidth

A ring is fast for long messages. Across hosts, an all_reduce may use two trees of hosts instead,
whose depth is the logarithm of the number of hosts; each link then carries twice the array. As in
NCCL (src/graph/tuning.cc), trees reach 0.92 of the bandwidth of rings. Where the switch reduces
(NVLS), each device sends its array once and receives the sum. Across hosts (NVLSTree), the sums of
the switches pass up and down the trees, once each way between two hosts. Only all_reduces are
assumed to use NVLS, because there are no measurements of other kinds.

Traffic between leaf switches gets `Cluster.oversubscription` times less bandwidth, whatever else is
sent. On rails, traffic stays on the rail of its NIC: rings connect the same NICs of all hosts, and
an all_to_all first moves what other rails carry to their NICs within the host (NCCL's PXN). A
message arrives at the NIC of its target device. Groups that leave a host's ports (see
`bridges_per_host`) share them as they share NICs.
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
_MOST_KNOWN = 1 << 16  # collectives whose seconds a model keeps


@dataclass(frozen=True)
class CollectiveModel:
    """A cost model of collectives on a cluster."""

    cluster: Cluster

    @cached_property
    def curves(self) -> CollectiveProfile:
        """The curves of collectives within a host."""
        return self.cluster.curves

    def ring(self, size: int, stride: int = 1) -> Ring:
        """Return the ring of `size` devices that are `stride` apart.

        All devices of the cluster form such groups at the same time.
        """
        key = size, stride
        if key not in self._known_rings:
            self._known_rings[key] = strided_ring(self.cluster, size, stride)
        return self._known_rings[key]

    @cached_property
    def _known_seconds(self) -> dict[tuple[CollectiveKind, float, Ring], float]:
        return {}

    @cached_property
    def _known_rings(self) -> dict[tuple[int, int], Ring]:
        return {}

    def link(self, far: bool) -> Link:
        """Return the link within a host, or between hosts if `far`."""
        inter = self.cluster.inter_host
        return inter if far and inter is not None else self.cluster.intra_host

    def collective_seconds(self, kind: CollectiveKind, num_bytes: float, routes: Routes) -> float:
        """Return the seconds until the slowest group ends; 0 if no device has a partner.

        Args:
            kind: the kind of collective.
            num_bytes: bytes of the whole array, as in `simulator.work.Collective`.
            routes: the rings of the groups, or the flows of a collective_permute.
        """
        if isinstance(routes, Flows):
            return self._permute_seconds(num_bytes, routes)
        return max(self.seconds(kind, num_bytes, ring) for ring in routes)

    def seconds(self, kind: CollectiveKind, num_bytes: float, ring: Ring) -> float:
        """Return the seconds of a collective of one group; 0 for a group of one device."""
        if ring.size == 1:
            return 0.0
        key = kind, num_bytes, ring
        seconds = self._known_seconds.get(key)
        if seconds is None:
            if len(self._known_seconds) == _MOST_KNOWN:
                self._known_seconds.clear()
            seconds = min(self.seconds_by_algorithm(kind, num_bytes, ring).values())
            self._known_seconds[key] = seconds
        return seconds

    def seconds_by_algorithm(
        self, kind: CollectiveKind, num_bytes: float, ring: Ring
    ) -> dict[str, float]:
        """Return the seconds of a collective of one group by each algorithm of NCCL."""
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
        """Return the seconds of a message to the device `stride` further, while all send one."""
        if stride not in self._known_sends:
            self._known_sends[stride] = self._sends(stride)
        return self._permute_seconds(num_bytes, self._known_sends[stride])

    @cached_property
    def _known_sends(self) -> dict[int, Flows]:
        return {}

    def _sends(self, stride: int) -> Flows:
        """Return the contention where each device sends a message to the one `stride` further."""
        cluster, local = self.cluster, self.cluster.devices_per_host
        if stride < local or cluster.inter_host is None:
            at_port = local // (cluster.bridges_per_host or local)
            return Flows(within=min(stride, at_port), across=0)
        leaves = (
            cluster.pod_of(cluster.hosts - 1) > 0
            or cluster.leaf_of(0)[1] != cluster.leaf_of(stride % local)[1]
        )
        slower = cluster.oversubscription if leaves else 1.0
        return Flows(0, slower * local / cluster.nics_per_host)

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
        return max(within, latency + _over_nics(num_bytes * flows.across, inter, 1.0))


def _ring_seconds(
    kind: CollectiveKind, num_bytes: float, ring: Ring, curve: SizeCurve, inter: Link
) -> float:
    """Return the seconds of a ring over several hosts."""
    sent = sent_fraction(kind, ring.size) * num_bytes
    network = _over_nics(sent, inter, ring.nics / ring.oversubscription)
    hops = curve.hop_us * (ring.size - ring.hosts) + inter.latency_us * ring.hosts
    if kind == "all_to_all":
        # There is no ring: devices send directly to the devices of the other hosts.
        per_target = ring.per_host * num_bytes / ring.size
        network = _over_nics(per_target * (ring.size - ring.per_host), inter, ring.nics)
        if ring.oversubscription > 1:
            upward = per_target * (ring.size - max(ring.per_host, ring.per_pod))
            network = max(network, _over_nics(upward, inter, ring.nics / ring.oversubscription))
        hops = max(curve.hop_us, inter.latency_us)
    latency = curve.start(ring.per_host) + hops * (2 if kind == "all_reduce" else 1)
    return latency * 1e-6 + max(_within(kind, num_bytes, sent, ring, curve), network)


def _tree_seconds(num_bytes: float, ring: Ring, curve: SizeCurve, inter: Link) -> float:
    """Return the seconds of an all_reduce over two trees of hosts, each for half of the array.

    Within a host, the devices form a chain.
    """
    moved = 2 * num_bytes / _TREE_EFFICIENCY
    hops = curve.hop_us * (ring.per_host - 1) + inter.latency_us * ceil(log2(ring.hosts))
    within = _within("all_reduce", num_bytes, moved, ring, curve)
    across = _over_nics(moved, inter, ring.nics / ring.oversubscription)
    return (curve.start(ring.per_host) + 2 * hops) * 1e-6 + max(within, across)


def _nvls_tree_seconds(num_bytes: float, ring: Ring, nvls: SwitchCurve, inter: Link) -> float:
    """Return the seconds of an all_reduce of the switches' sums over two trees of hosts."""
    moved = (1 if ring.hosts == 2 else 2) * num_bytes
    latency = nvls.launch_us + 2 * inter.latency_us * ceil(log2(ring.hosts))
    across = _over_nics(moved, inter, ring.nics / ring.oversubscription)
    return latency * 1e-6 + max(nvls.transfer(num_bytes, ring.per_host), across)


def _within(
    kind: CollectiveKind, num_bytes: float, sent: float, ring: Ring, curve: SizeCurve
) -> float:
    """Return the seconds of traffic within a host, over ports where there are any.

    Args:
        kind: the kind of collective.
        num_bytes: bytes of the whole array.
        sent: bytes that each device sends to the next of its host in a ring.
        ring: the ring.
        curve: the curve of the collective.
    """
    if kind == "all_to_all" and ring.per_port:
        # There is no ring: the devices of a port send directly to the others of the host.
        sent = max(sent, ring.per_port * (ring.per_host - ring.per_port) / ring.size * num_bytes)
    return curve.transfer(sent / ring.ports, ring.per_host) if ring.per_host > 1 else 0.0


def _over_nics(num_bytes: float, inter: Link, nics: float) -> float:
    return transfer_seconds(
        num_bytes, inter.half_size_mb * 1e6, inter.bandwidth_gb_per_s * 1e9 * nics
    )
