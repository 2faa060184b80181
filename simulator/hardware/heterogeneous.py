"""Heterogeneous clusters: pools of equal hosts, joined by one network.

A file describes one by `pools`, each of which has the fields of a cluster. The defaults of a pool
are the fields of the cluster that it is `like`, and then those that the file gives beside `pools`:

    name: v100_beside_a100
    description: a host with 8 V100s beside one with 8 A100s
    pools:
    - like: p3.16xlarge
    - {like: dgx_a100_40, nics_per_host: 4}
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from simulator.files import brief
from simulator.hardware.cluster import Cluster
from simulator.hardware.cluster_paths import cluster_path
from simulator.hardware.description import ClusterError, Description, read, validate


class HeterogeneousCluster(Description):
    """Pools of equal hosts, with another kind or number of devices in each pool.

    Devices are numbered pool by pool, and within a pool as by `Cluster`. A message between pools
    passes a NIC of either host; the slower one limits its bandwidth.

    Attributes:
        name: name of the cluster, by which its file is loaded.
        description: one line about the cluster.
        pools: a cluster for each pool.
    """

    name: str
    description: str
    pools: tuple[Cluster, ...]

    @model_validator(mode="after")
    def _pools_are_linked(self) -> Self:
        if len(self.pools) < 2:
            raise ValueError(
                f"pools: given {len(self.pools)}, expected at least 2; "
                "hosts that are alike are a cluster"
            )
        for i, pool in enumerate(self.pools):
            if pool.inter_host is None:
                raise ValueError(
                    f"pools.{i}.inter_host: missing, but there are other pools; describe the link "
                    "of its NICs, or one for all pools beside them"
                )
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def pool_starts(self) -> tuple[int, ...]:
        """The number of the first device of each pool."""
        return tuple(accumulate((pool.num_devices for pool in self.pools[:-1]), initial=0))

    def pool_of(self, devices: Sequence[int]) -> int:
        """Return the number of the pool that contains all of the devices.

        Raises:
            ClusterError: the devices are of several pools, or some are not in the cluster.
        """
        if min(devices) < 0 or max(devices) >= self.num_devices:
            raise ClusterError(
                f"devices {min(devices)} to {max(devices)} are not all in cluster {self.name!r}: "
                f"it has {self.num_devices}, numbered from 0 on"
            )
        starts = self.pool_starts
        numbers = sorted({bisect_right(starts, device) - 1 for device in devices})
        if len(numbers) > 1:
            pools = " and ".join(
                f"{starts[i]} to {starts[i] + self.pools[i].num_devices - 1} "
                f"({self.pools[i].device.name})"
                for i in numbers
            )
            raise ClusterError(
                f"devices {', '.join(map(str, devices))} lie in several pools of cluster "
                f"{self.name!r}, {pools}, but only devices of one pool can work as one mesh; give "
                "each mesh devices of one pool"
            )
        return numbers[0]

    def host_of(self, device_id: int) -> int:
        """Return the number of the host of a device, counted over all pools."""
        pool = self.pool_of((device_id,))
        hosts_before = sum(other.hosts for other in self.pools[:pool])
        return hosts_before + self.pools[pool].host_of(device_id - self.pool_starts[pool])

    def first_devices(self, count: int) -> "AnyCluster":
        """Return the cluster of the first `count` devices.

        It has complete pools, and at most one pool with fewer hosts, or with a part of one host.

        Raises:
            ClusterError: there are fewer devices, or the last pool would have a host and a part of
                one.
        """
        if not 1 <= count <= self.num_devices:
            raise ClusterError(
                f"{count} devices asked of {self.name!r}, which has {self.num_devices}; expected 1"
                f" to {self.num_devices}"
            )
        parts = [
            pool.first_devices(min(count - start, pool.num_devices))
            for pool, start in zip(self.pools, self.pool_starts, strict=True)
            if start < count
        ]
        return parts[0] if len(parts) == 1 else self.model_copy(update={"pools": tuple(parts)})


type AnyCluster = Cluster | HeterogeneousCluster


def load_cluster(name_or_path: str | Path) -> AnyCluster:
    """Return the cluster of a shipped file (by its name) or of a YAML file (by its path).

    Raises:
        ClusterError: there is no such file, or its fields are wrong.
    """
    path = cluster_path(name_or_path)
    fields = read(path)
    return _from_pools(fields, path) if "pools" in fields else Cluster.of_fields(fields, path)


def _from_pools(fields: Mapping[str, Any], path: Path) -> HeterogeneousCluster:
    given = fields["pools"]
    if not isinstance(given, list) or not all(isinstance(pool, dict) for pool in given):
        raise ClusterError(
            f"{path}: pools: given {brief(given)}; "
            "expected a list of sections with the fields of a cluster"
        )
    own = {key: fields[key] for key in ("name", "description") if key in fields}
    common = {key: value for key, value in fields.items() if key != "pools"}
    pools = [
        Cluster.of_fields(_pool_fields(common, pool, i, path), path, f": pools.{i}")
        for i, pool in enumerate(given)
    ]
    return validate(HeterogeneousCluster, own | {"pools": tuple(pools)}, path)


def _pool_fields(
    common: Mapping[str, Any], given: Mapping[str, Any], number: int, path: Path
) -> dict[str, Any]:
    """Return the fields of a pool: its own, else of the cluster it is `like`, else of all pools."""
    like: dict[str, Any] = {}
    if "like" in given:
        if not isinstance(given["like"], str):
            raise ClusterError(
                f"{path}: pools.{number}.like: given {brief(given['like'])}; "
                "expected a shipped cluster or a path to a .yaml file"
            )
        like = Cluster.load(cluster_path(given["like"], beside=path)).fields()
    name = {"name": f"{common.get('name')}, pool {number}"}
    own = {key: value for key, value in given.items() if key != "like"}
    return {**common, **name, **like, **own}
