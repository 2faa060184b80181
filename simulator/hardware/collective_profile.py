"""How long collectives of the devices of one host take, by kind and size: curves with few parameters, fitted to measured times."""

from math import pow, sqrt
from pathlib import Path
from typing import Self, assert_never

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from simulator.hardware.description import Description
from simulator.work import CollectiveKind

PROFILES = Path(__file__).parent / "profiles" / "collectives"


class SizeCurve(Description):
    """Time of one kind of collective within a host by the bytes S that each of n members sends round a ring:

        launch + (n - 1) * member + hops * hop + (S + sqrt(S * half_size)) / (bandwidth * (1 - small_group_loss / n) * (2 / n)^sharing)

    Attributes:
        member_us: of each member beside the first, where they share what starts them: virtual devices and their cores.
        hop_us: of one step of a ring; there are n - 1, twice as many of an all_reduce, one of an all_to_all.
        half_size_mb: S for which the square root costs as much as the bytes themselves.
        bandwidth_gb_per_s: bytes that a member of a large group sends per second; of a group of two, where they share it.
        small_group_loss: what a group of n loses of it, times n.
        sharing: 0 where each member has a link of its own, 1 where all of them share one memory.
        group_bandwidth_gb_per_s: by group size, where links without a switch make it another number altogether.
    """

    launch_us: NonNegativeFloat
    member_us: NonNegativeFloat = 0.0
    hop_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    small_group_loss: float = Field(default=0.0, ge=0, lt=2)
    sharing: NonNegativeFloat = 0.0
    group_bandwidth_gb_per_s: dict[PositiveInt, PositiveFloat] = Field(default_factory=dict)
    held_out_error: NonNegativeFloat | None = None

    def bandwidth(self, size: int) -> float:
        """Bytes that each of `size` devices sends per second."""
        usual = (
            self.bandwidth_gb_per_s
            * (1 - self.small_group_loss / size)
            * pow(2 / size, self.sharing)
        )
        return self.group_bandwidth_gb_per_s.get(size, usual) * 1e9

    def start(self, size: int) -> float:
        """Microseconds until `size` devices have started."""
        return self.launch_us + (size - 1) * self.member_us

    def latency(self, kind: CollectiveKind, size: int) -> float:
        """Seconds of a collective of nothing by `size` devices."""
        return (self.start(size) + hops(kind, size) * self.hop_us) * 1e-6

    def transfer(self, sent: float, size: int) -> float:
        """Seconds in which each of `size` devices sends so many bytes to the next one."""
        return transfer_seconds(sent, self.half_size_mb * 1e6, self.bandwidth(size))

    def seconds(self, kind: CollectiveKind, num_bytes: float, size: int) -> float:
        """Seconds of a collective over an array of `num_bytes` (as in `simulator.work.Collective`) by `size` devices."""
        return self.latency(kind, size) + self.transfer(sent_fraction(kind, size) * num_bytes, size)

    def faster(self, factor: float) -> Self:
        """The same with so many times the bandwidth."""
        groups = {size: factor * each for size, each in self.group_bandwidth_gb_per_s.items()}
        update = {
            "bandwidth_gb_per_s": factor * self.bandwidth_gb_per_s,
            "group_bandwidth_gb_per_s": groups,
        }
        return self.model_copy(update=update)


class SwitchCurve(Description):
    """Time of an all_reduce of n devices whose sums the switch makes. Each sends its array S once, and the n-th part it gathered again:

    launch + (S' + sqrt(S' * half_size)) / bandwidth,    S' = S * (n + 1) / n
    """

    launch_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    held_out_error: NonNegativeFloat | None = None

    def transfer(self, num_bytes: float, size: int) -> float:
        """Seconds of the bytes of an array."""
        return transfer_seconds(
            num_bytes * (size + 1) / size, self.half_size_mb * 1e6, self.bandwidth_gb_per_s * 1e9
        )

    def seconds(self, num_bytes: float, size: int) -> float:
        return self.launch_us * 1e-6 + self.transfer(num_bytes, size)

    def faster(self, factor: float) -> Self:
        """The same with so many times the bandwidth."""
        return self.model_copy(update={"bandwidth_gb_per_s": factor * self.bandwidth_gb_per_s})


class MeasuredLink(Description):
    """The link that collectives were measured over, by the fields of a cluster that describe it."""

    collective_launch_us: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat = 0.0

    @classmethod
    def of(cls, curve: SizeCurve, size: int) -> Self:
        """The link that a curve implies for groups of `size`."""
        return cls(
            collective_launch_us=curve.launch_us,
            bandwidth_gb_per_s=curve.bandwidth(size) / 1e9,
            latency_us=curve.hop_us,
            half_size_mb=curve.half_size_mb,
        )


class CollectiveProfile(Description):
    """The curves of the devices of a host. Kinds without one take that of the kind they are most like.

    Attributes:
        gpu: the device's name.
        source: what was measured, by whom, under which licence, and what was held out.
        link: what they were measured over. On a link of another bandwidth, bandwidths are others in proportion.
        collective_permute: messages between two devices.
        nvls: all_reduces whose sums the switch makes (NVLink SHARP), where that was told from rings.
    """

    gpu: str
    source: str
    link: MeasuredLink
    all_reduce: SizeCurve
    all_gather: SizeCurve | None = None
    reduce_scatter: SizeCurve | None = None
    all_to_all: SizeCurve | None = None
    collective_permute: SizeCurve | None = None
    nvls: SwitchCurve | None = None

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
            case "collective_permute":
                return self.collective_permute or self.all_to_all or self.all_reduce

    def over(self, link: MeasuredLink) -> Self:
        """The same over a link of another bandwidth."""
        factor = link.bandwidth_gb_per_s / self.link.bandwidth_gb_per_s
        if factor == 1:
            return self
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        curves = {
            name: curve for name, curve in fields if isinstance(curve, SizeCurve | SwitchCurve)
        }
        return self.model_copy(
            update={"link": link} | {name: each.faster(factor) for name, each in curves.items()}
        )


def transfer_seconds(num_bytes: float, half_size: float, bandwidth: float) -> float:
    """Seconds to send so many bytes over a link that needs `half_size` of them to get going."""
    return (num_bytes + sqrt(num_bytes * half_size)) / bandwidth


def sent_fraction(kind: CollectiveKind, size: int) -> float:
    """Bytes that each of `size` devices in a ring sends, per byte of the array (`simulator.work.Collective.num_bytes`)."""
    match kind:
        case "all_reduce":
            return 2 * (size - 1) / size
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (size - 1) / size
        case "collective_permute":
            return 1.0
        case _:
            assert_never(kind)


def hops(kind: CollectiveKind, size: int) -> int:
    """Steps of a ring of `size` until the last chunk has arrived; in an all_to_all everybody sends to everybody at once."""
    match kind:
        case "all_reduce":
            return 2 * (size - 1)
        case "all_gather" | "reduce_scatter":
            return size - 1
        case "all_to_all" | "collective_permute":
            return 1
        case _:
            assert_never(kind)
