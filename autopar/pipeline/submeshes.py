"""Submeshes: the slices of a cluster that stages can get, and how they are placed in it.

A cluster is one or more pools of equal hosts; hosts of other sizes or with other devices are pools
of their own. A submesh is part of one host, or several whole hosts of one pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

SubmeshSizes = Literal["powers_of_two", "whole_hosts", "all"]
"""Submeshes to choose from.

"powers_of_two" are powers of two devices of a host and powers of two hosts; "whole_hosts" are the
same with any number of hosts; "all" are any number of devices of a host, and of hosts. A whole host
and the whole pool are always among them.
"""


@dataclass(frozen=True, slots=True)
class HostPool:
    """Equal hosts.

    Attributes:
        hosts: number of hosts.
        devices_per_host: number of devices of each host.
        memory_bytes: memory of each device that a step may use.

    Raises:
        ValueError: there are no hosts or no devices.
    """

    hosts: int
    devices_per_host: int
    memory_bytes: float = float("inf")

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise ValueError(
                f"a pool needs hosts and devices, got {self.hosts} hosts of"
                f" {self.devices_per_host} devices"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """Devices of one pool for one stage.

    It prints as `2x8` (hosts x devices of each), in pool 1 as `1:2x8`.

    Attributes:
        pool: number of the pool.
        hosts: number of hosts.
        devices_per_host: number of devices of each host.
    """

    pool: int
    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.pool}:" * bool(self.pool) + f"{self.hosts}x{self.devices_per_host}"


def enumerate_submeshes(
    pools: Sequence[HostPool], sizes: SubmeshSizes = "powers_of_two"
) -> tuple[Submesh, ...]:
    """Return the submeshes of each pool from small to large (Alpa, OSDI'22, section 5.2).

    They are parts of a host, a host, and several hosts.

    Args:
        pools: the pools of a cluster.
        sizes: submeshes to choose from.
    """
    submeshes = []
    for i, pool in enumerate(pools):
        parts = (
            range(1, pool.devices_per_host + 1)
            if sizes == "all"
            else _powers_of_two(pool.devices_per_host)
        )
        hosts = _powers_of_two(pool.hosts) if sizes == "powers_of_two" else range(1, pool.hosts + 1)
        submeshes += [Submesh(i, 1, part) for part in parts]
        submeshes += [Submesh(i, count, pool.devices_per_host) for count in hosts if count > 1]
    return tuple(submeshes)


def counting_suffices(pool: HostPool, submeshes: Sequence[Submesh]) -> bool:
    """Return whether submeshes fit in the pool whenever it has enough devices for them.

    They do if every size divides the next larger one and the host: placed in order of size, the
    largest first, they leave no gaps.

    Args:
        pool: the pool.
        submeshes: submeshes of the pool, of which any number may be placed.
    """
    sizes = sorted({mesh.devices_per_host for mesh in submeshes} | {pool.devices_per_host})
    return all(large % small == 0 for small, large in pairwise(sizes))


def fits(pool: HostPool, submeshes: Sequence[Submesh]) -> bool:
    """Return whether the hosts of the pool have room for all submeshes together."""
    return _pack(pool, submeshes) is not None


def place(pools: Sequence[HostPool], submeshes: Sequence[Submesh]) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each submesh, counted pool by pool and host by host.

    Neighbours in the list are placed next to each other if that leaves room for all.

    Args:
        pools: the pools of a cluster.
        submeshes: submeshes of these pools.

    Raises:
        ValueError: they do not fit.
    """
    devices: dict[int, tuple[int, ...]] = {}
    first = 0
    for i, pool in enumerate(pools):
        indices = [index for index, mesh in enumerate(submeshes) if mesh.pool == i]
        in_pool = [submeshes[index] for index in indices]
        packed = _first_fit(pool, in_pool, range(len(in_pool))) or _pack(pool, in_pool)
        if packed is None:
            raise ValueError(
                f"submeshes {', '.join(map(str, in_pool))} don't fit in {pool.hosts} hosts of"
                f" {pool.devices_per_host} devices; use sizes that divide one another, or fewer"
                " devices"
            )
        for index, places in zip(indices, packed, strict=True):
            devices[index] = tuple(first + place for place in places)
        first += pool.num_devices
    return tuple(devices[index] for index in range(len(submeshes)))


def _powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below `limit`, and `limit`."""
    return [1 << k for k in range(limit.bit_length()) if 1 << k < limit] + [limit]


type _Places = list[tuple[int, ...]]


def _first_fit(
    pool: HostPool, submeshes: Sequence[Submesh], order: Sequence[int]
) -> _Places | None:
    """Return the devices of each submesh within the pool; None if there is no room.

    Each submesh is placed on the first hosts with room for it.

    Args:
        pool: the pool.
        submeshes: its submeshes.
        order: numbers of the submeshes in the order in which they are placed.
    """
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
    """Return the devices of each submesh, in whatever order they fit; None if they do not fit."""
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
    """Return a bin with room for each size, by depth-first search; None if there is none.

    Args:
        sizes: sizes, the largest first.
        room: room in each bin. Bins with the same room are tried once.
    """
    if not sizes:
        return []
    for bin_ in range(len(room)):
        if sizes[0] <= room[bin_] and room[bin_] not in room[:bin_]:
            rest = _fill(sizes[1:], [*room[:bin_], room[bin_] - sizes[0], *room[bin_ + 1 :]])
            if rest is not None:
                return [bin_, *rest]
    return None
