"""Fingerprint of the cluster whose seconds a program holds: analytic programs carry the cost of each kernel and collective themselves."""

from hashlib import sha256
from json import dumps
from typing import Any

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster
from simulator.program import Program

_TEXTS = {"name", "description", "source", "provenance"}
_FREE = {"memory_gb", "reserve_gb", "xla_target"}
"""What a device may differ in without being slower or faster."""

_BETWEEN = {"hosts", "devices_per_host", "nics_per_host", "inter_host"}
"""What only counts between hosts."""


def cost_fingerprint(program: Program, cluster: AnyCluster) -> str:
    """The cluster as `Program.costed_for` has it: its name, and a fingerprint of what the program costs there depends on."""
    hosts = {cluster.host_of(device) for devices in program.meshes for device in devices}
    pools = [
        cluster.pools[number]
        for number in sorted({cluster.pool_of(devices) for devices in program.meshes})
    ]
    costs = dumps([_costs(pool, within=len(hosts) == 1) for pool in pools], sort_keys=True)
    return f"{cluster.name} {sha256(costs.encode()).hexdigest()[:12]}"


def check_cost_fingerprint(program: Program, cluster: AnyCluster) -> None:
    """`ClusterError` if the program has the seconds of a cluster on which it would take others than on this one."""
    name, _, found = program.costed_for.rpartition(" ")
    if program.costed_for and cost_fingerprint(program, cluster).rpartition(" ")[2] != found:
        raise ClusterError(
            f"the program has the seconds that it takes on cluster {name!r}, which are not those of {cluster.name!r} as it is given here; "
            "make it for this cluster, or take a compiled program (fidelity='compiled'), which any cluster can time"
        )


def _costs(pool: Cluster, within: bool) -> dict[str, Any]:
    kept = pool.model_dump(
        mode="json", exclude=_TEXTS | {"hosts", "processes"} | (_BETWEEN if within else set())
    )
    kept["device"] = {
        key: value for key, value in kept["device"].items() if key not in _TEXTS | _FREE
    }
    return kept
