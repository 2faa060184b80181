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


def with_fields(cluster: Cluster, **fields: object) -> Cluster:
    return cluster.model_copy(update=fields)


@pytest.mark.parametrize(
    "cluster",
    [
        A100,
        A100.with_size(4),
        A100.with_size(1, 4),
        with_fields(
            A100,
            name="ours",
            description="",
            nics_per_host=1,
            device=with_fields(A100.device, memory_gb=60.0),
        ),
    ],
    ids=str,
)
def test_a_program_with_seconds_runs_on_clusters_with_equal_costs(cluster: Cluster) -> None:
    assert simulate(costed(A100, 0, 1), cluster).makespan == 3


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.load("dgx_h100"),
        with_fields(A100, intra_host=with_fields(A100.intra_host, bandwidth_gb_per_s=1.0)),
        with_fields(A100, device=with_fields(A100.device, kernel_launch_us=9.0)),
        A100.with_size(8, 1),  # the group spans hosts
    ],
    ids=str,
)
def test_a_program_with_seconds_is_refused_on_clusters_with_other_costs(cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError,
        match=r"seconds that it takes on cluster 'dgx_a100_80'.*make it for this cluster, "
        r"or take a compiled",
    ):
        simulate(costed(A100, 0, 1), cluster)


def test_costs_between_hosts_depend_on_the_network_and_not_on_the_number_of_hosts() -> None:
    two_hosts = A100.with_size(2)
    program = costed(two_hosts, *range(16))
    assert simulate(program, A100.with_size(3)).makespan == 3
    with pytest.raises(ClusterError, match="make it for this cluster"):
        simulate(program, with_fields(two_hosts, nics_per_host=4))


def test_only_costs_of_the_pools_that_a_program_uses_are_compared() -> None:
    v100, h100 = Cluster.load("p3.16xlarge"), Cluster.load("dgx_h100")
    first, second = (
        HeterogeneousCluster(name="both", description="", pools=(A100.with_size(1), pool))
        for pool in (v100, h100)
    )
    assert simulate(costed(first, 0, 1), second).makespan == 3
    with pytest.raises(ClusterError, match="make it for this cluster"):
        simulate(costed(first, 8, 9), second)
