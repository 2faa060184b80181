"""Layout of the hosts: their device numbers, their cluster, and the plans that suit them."""

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from autopar.devices import Devices, cluster_of_kind
from autopar.plan import Plan
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster


@dataclass(frozen=True)
class HostLayout:
    """The hosts that steps run on. Devices are numbered host by host.

    Attributes:
        counts: for each host its number of devices.
        addresses: for each host its network address.
        kinds: for each host the name that Ray gives to its accelerators, "" if it has none.
        platform: "cpu" or "cuda".
    """

    counts: tuple[int, ...]
    addresses: tuple[str, ...]
    kinds: tuple[str, ...]
    platform: str

    @cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each host the numbers of its devices."""
        ends = itertools.accumulate(self.counts)
        return tuple(
            tuple(range(end - count, end)) for end, count in zip(ends, self.counts, strict=True)
        )

    @cached_property
    def owner(self) -> dict[int, int]:
        """For each device its host."""
        return {device: host for host, devices in enumerate(self.numbers) for device in devices}

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return sum(self.counts)

    def hosts_of(self, devices: Iterable[int]) -> list[int]:
        """Return the hosts that have any of the devices, in ascending order."""
        return sorted({self.owner[device] for device in devices})

    def check_devices(self, meshes: Iterable[Iterable[int]]) -> None:
        """Raise ValueError if a mesh has a device that the hosts do not have."""
        needed = max(device for mesh in meshes for device in mesh) + 1
        if needed > self.num_devices:
            raise ValueError(
                f"the plan needs {needed} devices, the {len(self.counts)} hosts have"
                f" {self.num_devices}"
            )


def cluster_of_hosts(layout: HostLayout) -> AnyCluster:
    """Return the cost model's description of the hosts: a pool for each run of equal hosts."""
    names = {
        kind: "cpu-hosts" if layout.platform == "cpu" else cluster_of_kind(kind)
        for kind in layout.kinds
    }
    hosts = [(names[kind], count) for kind, count in zip(layout.kinds, layout.counts, strict=True)]
    pools = tuple(
        Cluster.load(name).with_size(len(list(same)), count)
        for (name, count), same in itertools.groupby(hosts)
    )
    if len(pools) == 1:
        return pools[0]
    return HeterogeneousCluster(
        name=f"{len(hosts)} hosts", description="hosts of a Ray cluster", pools=pools
    )


def mesh_shape(layout: HostLayout, devices: Devices) -> tuple[int, ...]:
    """Return the shape of the mesh that the user asks for, which takes the first devices.

    Args:
        layout: the hosts.
        devices: a number of devices, a mesh shape, or None for all devices.

    Raises:
        ValueError: the hosts have fewer devices, or `devices` are devices of this process.
    """
    if devices is None:
        return (layout.num_devices,)
    if isinstance(devices, int):
        sizes = (devices,)
    else:
        sizes = tuple(devices) if isinstance(devices, Sequence) else ()
    if not sizes or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ValueError(
            f"devices={devices!r}, expected a number of devices or a mesh shape such as (2, 4):"
            " steps run on other hosts, and this process has none of their devices"
        )
    if prod(sizes) > layout.num_devices:
        raise ValueError(
            f"a mesh of shape {sizes} needs {prod(sizes)} devices, the hosts have"
            f" {layout.num_devices}"
        )
    return tuple(map(int, sizes))


def check_plan(layout: HostLayout, plan: Plan, devices: Devices) -> None:
    """Check that a plan from elsewhere suits the hosts; warn about a stage that they split.

    Args:
        layout: the hosts.
        plan: the plan.
        devices: the devices that the user asks for.

    Raises:
        ValueError: the number of `devices` differs from the plan's.
    """
    stages = [stage.devices for stage in plan.stages]
    needed = max(device for members in stages for device in members) + 1
    if devices is not None and prod(mesh_shape(layout, devices)) != needed:
        raise ValueError(
            f"devices={devices!r}, but the plan has {needed}; leave `devices` out to run the plan"
            f" on the first {needed} devices of the hosts"
        )
    if needed > layout.num_devices:
        return  # compiling the plan raises the error
    most = max(layout.counts)
    split = [
        number
        for number, members in enumerate(stages)
        if len(members) <= most and len(layout.hosts_of(members)) > 1
    ]
    if split:
        warnings.warn(
            f"the plan was made for other hosts: stage {' and '.join(map(str, split))} spans"
            " several of these hosts, although one has enough devices for it, so its collectives"
            " cross hosts; plan the step again for these hosts",
            stacklevel=2,
        )
