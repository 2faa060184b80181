"""Fingerprint of the cluster whose seconds a program stores.

Analytic programs store the seconds of each kernel and collective, for one cluster.
"""

from hashlib import sha256
from json import dumps
from typing import Any

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Program

_TEXTS = {"name", "description", "source", "provenance"}
_FREE = {"memory_gb", "reserve_gb", "xla_target"}
"""Fields of a device that don't change its speed."""

_BETWEEN = {"hosts", "devices_per_host", "nics_per_host", "inter_host"}
"""Fields of a cluster that change only communication between hosts."""


def cost_fingerprint(program: Program, cluster: AnyCluster) -> str:
    """Return `Program.costed_for`: the cluster's name, and a fingerprint of all that has a cost.

    Args:
        program: the program, whose meshes determine which parts of the cluster count.
        cluster: the cluster.
    """
    hosts = {cluster.host_of(device) for devices in program.meshes for device in devices}
    numbers = sorted({cluster.pool_of(devices) for devices in program.meshes})
    within = len(hosts) == 1
    costs = dumps([_costs(cluster.pools[number], within) for number in numbers], sort_keys=True)
    return f"{cluster.name} {sha256(costs.encode()).hexdigest()[:12]}"


def check_cost_fingerprint(program: Program, cluster: AnyCluster) -> None:
    """Check that the seconds that a program stores, if any, were computed for `cluster`.

    Raises:
        ClusterError: the program stores the seconds of a cluster with other costs.
    """
    name, _, fingerprint = program.costed_for.rpartition(" ")
    if program.costed_for and cost_fingerprint(program, cluster).rpartition(" ")[2] != fingerprint:
        raise ClusterError(
            f"the program has the seconds that it takes on cluster {name!r}, which are not those of"
            f" {cluster.name!r} as it is given here; make it for this cluster, or take a compiled"
            " program (fidelity='compiled'), which any cluster can time"
        )


def _costs(pool: Cluster, within: bool) -> dict[str, Any]:
    excluded = _TEXTS | {"hosts", "processes"} | (_BETWEEN if within else set())
    fields = pool.model_dump(mode="json", exclude=excluded)
    fields["device"] = {
        key: value for key, value in fields["device"].items() if key not in _TEXTS | _FREE
    }
    return fields
