"""Submeshes: the slices of a cluster that stages can get, and where they lie.

A cluster is one or more pools of equal hosts; hosts of other sizes or with other devices are pools of their own. A submesh is part
of one host, or several whole hosts of one pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

SubmeshSizes = Literal["powers_of_two", "whole_hosts", "all"]
"""Which submeshes to offer: powers of two devices of a host and powers of two hosts; the same with any number of hosts; all.
A whole host and the whole pool always belong to them."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """Equal hosts.

    Attributes:
        memory_bytes: what a step may use on each device.
    """

    hosts: int
    devices_per_host: int
    memory_bytes: float = float("inf")

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise ValueError(
                f"a pool needs hosts and devices, got {self.hosts} hosts of {self.devices_per_host} devices"
            )

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """Devices of one pool for one stage, printed `2x8` (hosts x devices of each), `1:2x8` in pool 1."""

    pool: int
    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.pool}:" * bool(self.pool) + f"{self.hosts}x{self.devices_per_host}"


def enumerate_submeshes(
    pools: Sequence[HostPool], sizes: SubmeshSizes = "powers_of_two"
) -> tuple[Submesh, ...]:
    """The submeshes of each pool from small to large: parts of a host, a host, several hosts (Alpa, OSDI'22, section 5.2)."""
    found = []
    for i, pool in enumerate(pools):
        parts = (
            range(1, pool.devices_per_host + 1)
            if sizes == "all"
            else _powers_of_two(pool.devices_per_host)
        )
        hosts = _powers_of_two(pool.hosts) if sizes == "powers_of_two" else range(1, pool.hosts + 1)
        found += [Submesh(i, 1, part) for part in parts]
        found += [Submesh(i, count, pool.devices_per_host) for count in hosts if count > 1]
    return tuple(found)


def logical_shapes(num_devices: int) -> tuple[tuple[int, int], ...]:
    """Every way to see devices as a mesh with two axes: (1, n), (2, n / 2), ..., (n, 1)."""
    return tuple(
        (rows, num_devices // rows) for rows in range(1, num_devices + 1) if num_devices % rows == 0
    )


def counting_suffices(pool: HostPool, submeshes: Sequence[Submesh]) -> bool:
    """Whether submeshes fit in the pool as soon as their devices are not more than it has.

    They do if every size divides the next larger one and the host: put in the largest first, and no gap is left.
    """
    sizes = sorted({mesh.devices_per_host for mesh in submeshes} | {pool.devices_per_host})
    return all(large % small == 0 for small, large in pairwise(sizes))


def fits(pool: HostPool, submeshes: Sequence[Submesh]) -> bool:
    """Whether the hosts of the pool hold all submeshes at once."""
    return _pack(pool, submeshes) is not None


def place(pools: Sequence[HostPool], submeshes: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """For each submesh its devices, counted pool by pool and host by host.

    Neighbours in the list are kept together where that leaves room for all.

    Raises:
        ValueError: they don't fit.
    """
    devices: dict[int, tuple[int, ...]] = {}
    first = 0
    for i, pool in enumerate(pools):
        mine = [index for index, mesh in enumerate(submeshes) if mesh.pool == i]
        wanted = [submeshes[index] for index in mine]
        packed = _first_fit(pool, wanted, range(len(wanted))) or _pack(pool, wanted)
        if packed is None:
            raise ValueError(
                f"submeshes {', '.join(map(str, wanted))} don't fit in {pool.hosts} hosts of {pool.devices_per_host} devices; "
                "use sizes that divide one another, or fewer devices"
            )
        for index, places in zip(mine, packed, strict=True):
            devices[index] = tuple(first + place for place in places)
        first += pool.num_devices
    return tuple(devices[index] for index in range(len(submeshes)))


def _powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... below `limit`, and `limit`."""
    return [1 << k for k in range(limit.bit_length()) if 1 << k < limit] + [limit]


type _Places = list[tuple[int, ...]]


def _first_fit(
    pool: HostPool, submeshes: Sequence[Submesh], order: Sequence[int]
) -> _Places | None:
    """Devices of each submesh within the pool, each put in the first hosts with room, in the given order."""
    size = pool.devices_per_host
    used = [0] * pool.hosts
    places: _Places = [()] * len(submeshes)
    for index in order:
        mesh = submeshes[index]
        room = [host for host in range(pool.hosts) if used[host] + mesh.devices_per_host <= size][
            : mesh.hosts
        ]
        if len(room) < mesh.hosts:
            return None
        places[index] = tuple(
            host * size + used[host] + i for host in room for i in range(mesh.devices_per_host)
        )
        for host in room:
            used[host] += mesh.devices_per_host
    return places


def _pack(pool: HostPool, submeshes: Sequence[Submesh]) -> _Places | None:
    """As `_first_fit`, in whatever order works; None if none does."""
    if sum(mesh.num_devices for mesh in submeshes) > pool.num_devices:
        return None
    order = sorted(range(len(submeshes)), key=lambda i: (-submeshes[i].num_devices, i))
    places = _first_fit(pool, submeshes, order)
    if places is not None or counting_suffices(pool, submeshes):
        return places
    whole = [i for i in order if submeshes[i].devices_per_host == pool.devices_per_host]
    parts = [i for i in order if submeshes[i].devices_per_host < pool.devices_per_host]
    left = pool.hosts - sum(submeshes[i].hosts for i in whole)
    bins = _fill([submeshes[i].devices_per_host for i in parts], [pool.devices_per_host] * left)
    if bins is None:
        return None
    return _first_fit(
        pool, submeshes, [*whole, *(part for _, part in sorted(zip(bins, parts, strict=True)))]
    )


def _fill(sizes: list[int], room: list[int]) -> list[int] | None:
    """For each size, largest first, a bin with room for it: depth-first search over bins with different room."""
    if not sizes:
        return []
    for bin_ in range(len(room)):
        if sizes[0] <= room[bin_] and room[bin_] not in room[:bin_]:
            rest = _fill(sizes[1:], [*room[:bin_], room[bin_] - sizes[0], *room[bin_ + 1 :]])
            if rest is not None:
                return [bin_, *rest]
    return None
