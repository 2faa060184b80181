"""Size curves: seconds of collectives within a host, by kind, bytes and group size.

A curve has few parameters, which `simulator.calibration.fit_collectives` fits to measured times.
"""

from math import pow, sqrt
from pathlib import Path
from typing import Self, assert_never

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from simulator.hardware.description import Description
from simulator.work import CollectiveKind

PROFILES = Path(__file__).parent / "profiles" / "collectives"


class SizeCurve(Description):
    """Seconds of one kind of collective within a host.

    With n members, each of which sends S bytes round a ring, a collective takes

        launch + (n - 1) * member + hops * hop + (S + sqrt(S * half_size)) / b(n)
        b(n) = bandwidth * (1 - small_group_loss / n) * (2 / n)^sharing

    Attributes:
        launch_us: launch of the collective.
        member_us: launch of each member beside the first, where one processor starts all of them:
            virtual devices share the cores of the host.
        hop_us: latency of one step of a ring. An all_gather takes n - 1 steps, an all_reduce twice
            as many, an all_to_all one.
        half_size_mb: S at which the square root costs as much as the bytes themselves.
        bandwidth_gb_per_s: bytes that a member of a large group sends per second. Where members
            share one memory, a member of a group of two sends as many.
        small_group_loss: fraction of the bandwidth that a group of n loses, times n.
        sharing: 0 where each member has its own link, 1 where all of them share one memory.
        group_bandwidth_gb_per_s: bandwidth by group size. It replaces b(n) where devices are linked
            in pairs, without a switch.
        held_out_error: mean absolute relative error on rows outside the fit.
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
        """Return the bytes that each of `size` devices sends per second."""
        usual = (
            self.bandwidth_gb_per_s
            * (1 - self.small_group_loss / size)
            * pow(2 / size, self.sharing)
        )
        return self.group_bandwidth_gb_per_s.get(size, usual) * 1e9

    def start(self, size: int) -> float:
        """Return the microseconds until `size` devices have started."""
        return self.launch_us + (size - 1) * self.member_us

    def latency(self, kind: CollectiveKind, size: int) -> float:
        """Return the seconds of an empty collective of `size` devices."""
        return (self.start(size) + hops(kind, size) * self.hop_us) * 1e-6

    def transfer(self, sent: float, size: int) -> float:
        """Return the seconds in which each of `size` devices sends `sent` bytes to the next one."""
        return transfer_seconds(sent, self.half_size_mb * 1e6, self.bandwidth(size))

    def seconds(self, kind: CollectiveKind, num_bytes: float, size: int) -> float:
        """Return the seconds of a collective.

        Args:
            kind: the kind of the collective.
            num_bytes: bytes of the whole array, as in `simulator.work.Collective`.
            size: devices in the group.
        """
        return self.latency(kind, size) + self.transfer(sent_fraction(kind, size) * num_bytes, size)

    def faster(self, factor: float) -> Self:
        """Return the curve with `factor` times the bandwidth."""
        groups = {
            size: factor * bandwidth for size, bandwidth in self.group_bandwidth_gb_per_s.items()
        }
        update = {
            "bandwidth_gb_per_s": factor * self.bandwidth_gb_per_s,
            "group_bandwidth_gb_per_s": groups,
        }
        return self.model_copy(update=update)


class SwitchCurve(Description):
    """Seconds of an all_reduce whose sums the switch computes (NVLink SHARP).

    Each of n devices sends its array of S bytes once, and the n-th part that it gathered again:

        launch + (S' + sqrt(S' * half_size)) / bandwidth,    S' = S * (n + 1) / n
    """

    launch_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    held_out_error: NonNegativeFloat | None = None

    def transfer(self, num_bytes: float, size: int) -> float:
        """Return the seconds in which `size` devices send an array of `num_bytes`."""
        return transfer_seconds(
            num_bytes * (size + 1) / size, self.half_size_mb * 1e6, self.bandwidth_gb_per_s * 1e9
        )

    def seconds(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all_reduce of `num_bytes` by `size` devices."""
        return self.launch_us * 1e-6 + self.transfer(num_bytes, size)

    def faster(self, factor: float) -> Self:
        """Return the curve with `factor` times the bandwidth."""
        return self.model_copy(update={"bandwidth_gb_per_s": factor * self.bandwidth_gb_per_s})


class MeasuredLink(Description):
    """The link over which collectives were measured, in the fields of a cluster and its links."""

    collective_launch_us: NonNegativeFloat
    bandwidth_gb_per_s: PositiveFloat
    latency_us: NonNegativeFloat
    half_size_mb: NonNegativeFloat = 0.0

    @classmethod
    def of(cls, curve: SizeCurve, size: int) -> Self:
        """Return the link that a curve implies for groups of `size` devices."""
        return cls(
            collective_launch_us=curve.launch_us,
            bandwidth_gb_per_s=curve.bandwidth(size) / 1e9,
            latency_us=curve.hop_us,
            half_size_mb=curve.half_size_mb,
        )


class CollectiveProfile(Description):
    """The size curves of the devices of a host.

    A kind without a curve has the curve of the most similar kind.

    Attributes:
        gpu: name of the device.
        source: what was measured, by whom, under which licence, and what was held out.
        link: the link over which the curves were measured. Over a link of another bandwidth,
            bandwidths scale in proportion.
        all_reduce: curve of all_reduces, over rings where `nvls` has a curve too.
        all_gather: curve of all_gathers; `all_reduce` by default.
        reduce_scatter: curve of reduce_scatters; `all_gather` by default.
        all_to_all: curve of all_to_alls; `all_reduce` by default.
        collective_permute: curve of messages between two devices.
        nvls: curve of all_reduces whose sums the switch computes (NVLink SHARP), where they were
            measured separately from rings.
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
        """Return the curve of a kind of collective."""
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
        """Return the profile over a link of another bandwidth."""
        factor = link.bandwidth_gb_per_s / self.link.bandwidth_gb_per_s
        if factor == 1:
            return self
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        curves = {
            name: curve.faster(factor)
            for name, curve in fields
            if isinstance(curve, SizeCurve | SwitchCurve)
        }
        return self.model_copy(update={"link": link} | curves)


def transfer_seconds(num_bytes: float, half_size: float, bandwidth: float) -> float:
    """Return the seconds of a transfer.

    Args:
        num_bytes: bytes of the message.
        half_size: message at which the link reaches half of its bandwidth.
        bandwidth: bytes per second of long messages.
    """
    return (num_bytes + sqrt(num_bytes * half_size)) / bandwidth


def sent_fraction(kind: CollectiveKind, size: int) -> float:
    """Return the bytes that each of `size` devices in a ring sends, per byte of the whole array.

    `simulator.work.Collective.num_bytes` defines the whole array of each kind.
    """
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
    """Return the steps of a ring of `size` devices until the last chunk has arrived.

    The messages of an all_to_all are sent in parallel: one step.
    """
    match kind:
        case "all_reduce":
            return 2 * (size - 1)
        case "all_gather" | "reduce_scatter":
            return size - 1
        case "all_to_all" | "collective_permute":
            return 1
        case _:
            assert_never(kind)
