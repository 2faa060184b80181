"""Seconds of collectives of regular groups, whatever their number: measured size curves within a host, shared network cards between hosts.

`simulator.network` prices any groups of device ids with one curve for all kinds; that is what plans are compared with. This is the finer
model that `simulator.formula` uses: a curve for each kind, fitted by `simulator.calibration.collectives`, and groups that are given by
size and stride, so that ten or a hundred thousand devices cost the same to think about.
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from simulator.cluster import Cluster, Link
from simulator.description import ClusterError, Description, read, validate
from simulator.network import Ring, sent_fraction
from simulator.work import CollectiveKind

PROFILES = Path(__file__).parent / "profiles" / "collectives"


class SizeCurve(Description):
    """Time of one kind of collective within a host by the bytes S that each of n members sends:

        launch + hops * hop + (S + sqrt(S * half_size)) / (bandwidth * (1 - small_group_loss / n))

    Attributes:
        hop_us: of one step of a ring; there are n - 1, twice as many of an all_reduce, one of an all_to_all.
        half_size_mb: S for which the square root costs as much as the bytes themselves.
        bandwidth_gb_per_s: bytes that a member of a large group sends per second.
        small_group_loss: what a group of n loses of it, times n.
        group_bandwidth_gb_per_s: by group size, where links without a switch make it another number altogether.
    """

    launch_us: NonNegativeFloat
    hop_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    small_group_loss: float = Field(default=0.0, ge=0, lt=2)
    group_bandwidth_gb_per_s: dict[PositiveInt, PositiveFloat] = Field(default_factory=dict)
    held_out_error: NonNegativeFloat | None = None

    def bandwidth(self, size: int) -> float:
        """Bytes that each of `size` devices sends per second."""
        usual = self.bandwidth_gb_per_s * (1 - self.small_group_loss / size)
        return self.group_bandwidth_gb_per_s.get(size, usual) * 1e9

    def seconds(self, kind: CollectiveKind, num_bytes: float, size: int) -> float:
        """Seconds of a collective over an array of `num_bytes` (as in `simulator.work.Collective`) by `size` devices."""
        sent = sent_fraction(kind, size) * num_bytes
        return (self.launch_us + hops(kind, size) * self.hop_us) * 1e-6 + transfer_seconds(
            sent, self.half_size_mb * 1e6, self.bandwidth(size)
        )


class CollectiveProfile(Description):
    """The curves of the GPUs of a host. Kinds without one take that of the kind they are most like.

    Attributes:
        gpu: the device's name.
        source: what was measured, by whom, under which licence, and what was held out.
    """

    gpu: str
    source: str
    all_reduce: SizeCurve
    all_gather: SizeCurve | None = None
    reduce_scatter: SizeCurve | None = None
    all_to_all: SizeCurve | None = None
    permute: SizeCurve | None = None

    def curve(self, kind: CollectiveKind) -> SizeCurve:
        match kind:
            case "all_reduce":
                return self.all_reduce
            case "all_gather":
                return self.all_gather or self.all_reduce
            case "reduce_scatter":
                return self.reduce_scatter or self.all_gather or self.all_reduce
            case "all_to_all":
                return self.all_to_all or self.all_reduce
            case "permute":
                return self.permute or self.all_to_all or self.all_reduce

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The shipped profile of the cluster's devices; one made of the cluster's own link where there is none."""
        known = _shipped()
        if cluster.device.name in known:
            return validate(cls, read(known[cluster.device.name]), known[cluster.device.name])
        link = cluster.intra_host
        curve = {
            "launch_us": cluster.collective_launch_us,
            "hop_us": link.latency_us,
            "half_size_mb": link.half_size_mb,
            "bandwidth_gb_per_s": link.bandwidth_gb_per_s,
            "group_bandwidth_gb_per_s": link.group_bandwidth_gb_per_s,
        }
        return validate(cls, {"gpu": cluster.device.name, "source": cluster.source, "all_reduce": curve}, cluster.name)


@dataclass(frozen=True, slots=True)
class Network:
    """What collectives cost on a cluster."""

    cluster: Cluster
    profile: CollectiveProfile

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        return cls(cluster, CollectiveProfile.of(cluster))

    def ring(self, size: int, stride: int = 1) -> Ring:
        """The ring of `size` devices that are `stride` apart, where all devices of the cluster form such groups at the same time."""
        return strided_ring(self.cluster, size, stride)

    def seconds(self, kind: CollectiveKind, num_bytes: float, ring: Ring) -> float:
        """Seconds of a collective; 0 for a group of one. Across hosts the slower of the links sets the pace, and hops add up."""
        if ring.size == 1 or num_bytes == 0:
            return 0.0
        curve = self.profile.curve(kind)
        inter = self.cluster.inter_host
        if ring.hosts == 1 or inter is None:
            return curve.seconds(kind, num_bytes, ring.size)
        across = sent_fraction(kind, ring.size) * num_bytes
        if kind == "all_to_all":  # each device of the host sends over the network what is for the other hosts
            across = ring.per_host * (ring.size - ring.per_host) / ring.size * num_bytes
        wire = transfer_seconds(across, inter.half_size_mb * 1e6, inter.bandwidth_gb_per_s * 1e9 * ring.nics)
        within = curve.seconds(kind, num_bytes, ring.per_host) if ring.per_host > 1 else curve.launch_us * 1e-6
        latency = 1 if kind == "all_to_all" else ring.hosts * (2 if kind == "all_reduce" else 1)
        return latency * inter.latency_us * 1e-6 + max(wire, within)

    def send_seconds(self, num_bytes: float, stride: int) -> float:
        """Seconds of a message to the device `stride` further on, while all devices send one."""
        link, share = self._link(stride)
        return (link.latency_us + self.profile.all_reduce.launch_us) * 1e-6 + transfer_seconds(
            num_bytes, link.half_size_mb * 1e6, link.bandwidth_gb_per_s * 1e9 * share
        )

    def _link(self, stride: int) -> tuple[Link, float]:
        """The link to the device `stride` further on, and the part of it that a device has."""
        cluster = self.cluster
        if stride < cluster.devices_per_host or cluster.inter_host is None:
            return cluster.intra_host, 1.0
        return cluster.inter_host, min(1.0, cluster.nics_per_host / cluster.devices_per_host)


def strided_ring(cluster: Cluster, size: int, stride: int) -> Ring:
    """As `simulator.network.find_routes` of all groups of `size` devices that are `stride` apart, in closed form.

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


def hops(kind: CollectiveKind, size: int) -> int:
    """Steps of a ring of `size` until the last chunk has arrived; in an all_to_all everybody sends to everybody at once."""
    match kind:
        case "all_reduce":
            return 2 * (size - 1)
        case "all_gather" | "reduce_scatter":
            return size - 1
        case "all_to_all" | "permute":
            return 1


def transfer_seconds(num_bytes: float, half_size: float, bandwidth: float) -> float:
    """Seconds to send so many bytes over a link that needs `half_size` of them to get going."""
    return (num_bytes + sqrt(num_bytes * half_size)) / bandwidth


@cache
def _shipped() -> dict[str, Path]:
    return {str(read(path)["gpu"]): path for path in PROFILES.glob("*.yaml")}
