"""A cost model of a toy cluster, on which planners and the event engine are easy to check."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import inf

from simulator.hardware.collective_profile import sent_fraction
from simulator.spans import Link
from simulator.work import CollectiveKind, Groups, Kernel


@dataclass(frozen=True, slots=True)
class BandwidthOnly:
    """The seconds of arithmetic and of sent bytes alone.

    There is no latency, and each device has the same bandwidth to all others.

    Attributes:
        bandwidth: bytes per second that each device sends.
        flop_per_s: speed of all arithmetic; infinity makes computation free.
    """

    bandwidth: float = 1e9
    flop_per_s: float = inf

    def kernel(self, kernel: Kernel, /, device: int = 0) -> float:
        """Return the seconds of a kernel's arithmetic."""
        return kernel.flops / self.flop_per_s

    def collective(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Return the seconds of a collective, as `CostModel.collective`."""
        size = max(len(set(group)) for group in groups)  # A device that sends to itself is alone.
        return sent_fraction(kind, size) * num_bytes / self.bandwidth if size > 1 else 0.0

    def contention_factor(self, groups: Groups) -> float:
        """Return 1: nothing contends."""
        return 1.0

    def link(self, groups: Groups) -> Link:
        """Return the only class of links."""
        return "within hosts"

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        """Return no NICs."""
        return {}
