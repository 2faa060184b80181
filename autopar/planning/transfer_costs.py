"""Times of the transfers of activations and their gradients between neighbouring stages."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from autopar.pipeline.submeshes import HostPool, Submesh
from simulator.costs.cost_model import CostModel


class TransferCosts:
    """Times of the transfers between neighbouring stages.

    Stages of one pool are taken to follow one another, as `place` places stages of one size. Stages
    of different pools are taken to be at the start of their pool: the network between pools is the
    same from everywhere.
    """

    def __init__(
        self, pools: Sequence[HostPool], crossing_bytes: Sequence[float], links: CostModel
    ) -> None:
        self._pools = pools
        self._crossing_bytes = crossing_bytes
        self._links = links
        self._starts = [0, *accumulate(pool.num_devices for pool in pools)]
        self._seconds: dict[tuple[int, Submesh, Submesh, int | None], float] = {}

    def seconds(
        self, boundary: int, source: Submesh, destination: Submesh, before: int | None
    ) -> float:
        """Return the seconds that a microbatch takes from `source` to `destination`.

        Args:
            boundary: the layer that the second stage starts with.
            source: submesh of the first stage.
            destination: submesh of the second stage.
            before: devices of its pool before the second stage; None for the fastest place, which
                is within one host if both fit.
        """
        key = boundary, source, destination, before
        if key not in self._seconds:
            self._seconds[key] = self._compute(*key)
        return self._seconds[key]

    def _compute(
        self, boundary: int, source: Submesh, destination: Submesh, before: int | None
    ) -> float:
        if source.pool != destination.pool:
            first = self._starts[source.pool]
            second = self._starts[destination.pool]
        else:
            pool = self._pools[source.pool]
            if before is None:
                before = _fastest_boundary(pool, source, destination)
            if before < source.num_devices or before + destination.num_devices > pool.num_devices:
                return inf
            second = self._starts[source.pool] + before
            first = second - source.num_devices
        return transfer_seconds(
            self._links,
            self._crossing_bytes[boundary],
            range(first, first + source.num_devices),
            range(second, second + destination.num_devices),
        )


def _fastest_boundary(pool: HostPool, source: Submesh, destination: Submesh) -> int:
    """Return the devices before the second of two stages where transfers are fastest.

    Both stages are within one host if it has room for them. Otherwise the first one ends with a
    host.
    """
    host = pool.devices_per_host
    if source.num_devices + destination.num_devices <= host:
        return source.num_devices
    return -(-source.num_devices // host) * host


def transfer_seconds(
    costs: CostModel, num_bytes: float, source: Sequence[int], destination: Sequence[int]
) -> float:
    """Return the seconds to move bytes from some devices to others.

    Each source device sends its share to one destination device. Gathering within the destination,
    where it has more devices, is not counted.

    Args:
        costs: cost of a collective_permute, by numbers of devices in the cluster.
        num_bytes: bytes of the whole value.
        source: numbers of the devices that send.
        destination: numbers of the devices that receive.
    """
    if not num_bytes:
        return 0.0
    pairs = tuple((a, b) for a, b in zip(source, destination, strict=False))
    return costs.collective("collective_permute", num_bytes / len(pairs), pairs)
