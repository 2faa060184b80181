"""A program with seconds of its own is refused on clusters where they would differ."""

from dataclasses import replace

import pytest

from simulator.costs.cost_fingerprint import cost_fingerprint
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import HeterogeneousCluster
from simulator.program import Program, Run
from simulator.work import Kernel

A100 = Cluster.load("dgx_a100_80")


def costed(cluster: Cluster | HeterogeneousCluster, *devices: int) -> Program:
    """Return a program of one kernel with its seconds on `cluster`."""
    program = Program(
        (devices,), ((Run(0, "S"),),), {"0S": (Kernel("dot", "memory", 0, 0, seconds=3.0),)}
    )
    return replace(program, costed_for=cost_fingerprint(program, cluster))


def changed(cluster: Cluster, **fields: object) -> Cluster:
    return cluster.model_copy(update=fields)


@pytest.mark.parametrize(
    "cluster",
    [
        A100,
        A100.with_size(4),
        A100.with_size(1, 4),
        changed(
            A100,
            name="ours",
            description="",
            nics_per_host=1,
            device=changed(A100.device, memory_gb=60.0),
        ),
    ],
    ids=str,
)
def test_it_runs_where_it_takes_the_same_seconds(cluster: Cluster) -> None:
    assert simulate(costed(A100, 0, 1), cluster).makespan == 3


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.load("dgx_h100"),
        changed(A100, intra_host=changed(A100.intra_host, bandwidth_gb_per_s=1.0)),
        changed(A100, device=changed(A100.device, kernel_launch_us=9.0)),
        A100.with_size(8, 1),  # Where the group spans hosts.
    ],
    ids=str,
)
def test_it_is_refused_where_it_would_take_others(cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError,
        match=r"seconds that it takes on cluster 'dgx_a100_80'.*make it for this cluster, "
        r"or take a compiled",
    ):
        simulate(costed(A100, 0, 1), cluster)


def test_between_hosts_the_network_counts_and_the_number_of_hosts_does_not() -> None:
    two = A100.with_size(2)
    program = costed(two, *range(16))
    assert simulate(program, A100.with_size(3)).makespan == 3
    with pytest.raises(ClusterError, match="make it for this cluster"):
        simulate(program, changed(two, nics_per_host=4))


def test_only_the_pools_that_a_program_uses_count() -> None:
    v100, h100 = Cluster.load("p3.16xlarge"), Cluster.load("dgx_h100")
    first, second = (
        HeterogeneousCluster(name="both", description="", pools=(A100.with_size(1), each))
        for each in (v100, h100)
    )
    assert simulate(costed(first, 0, 1), second).makespan == 3
    with pytest.raises(ClusterError, match="make it for this cluster"):
        simulate(costed(first, 8, 9), second)
