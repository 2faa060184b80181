"""Cost models: of a cluster's devices and network, and of bandwidth alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.collective_model import CollectiveModel
from simulator.costs.cost_model import ClusterCosts, CostModel
from simulator.costs.kernel_model import KernelModel
from simulator.hardware.cluster import Cluster
from simulator.hardware.topology import find_routes
from simulator.work import Gemm, Kernel
from tests.toy_costs import BandwidthOnly

CLUSTER = Cluster.load("p3.16xlarge")


def test_cluster_costs_combine_the_kernel_and_the_collective_model() -> None:
    costs: CostModel = ClusterCosts(CLUSTER)
    kernel = Kernel("dot", "gemm", 2e9, 3e6, "f32", Gemm(1000, 1000, 1000))
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    routes = find_routes(CLUSTER, "all_gather", groups)
    assert costs.kernel(kernel) == KernelModel(CLUSTER.device).seconds(kernel)
    assert costs.collective("all_gather", 1e6, groups) == CollectiveModel(
        CLUSTER
    ).collective_seconds("all_gather", 1e6, routes)


def test_equal_kernels_of_other_names_are_priced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(KernelModel, "seconds", lambda self, kernel: calls.append(kernel) or 1.0)
    costs = ClusterCosts(CLUSTER)
    assert [costs.kernel(Kernel(f"add.{i}", "memory", 0, 8)) for i in range(3)] == [1.0] * 3
    assert len(calls) == 1


@given(st.integers(2, 16), st.floats(1, 1e12))
def test_bandwidth_only_charges_only_bytes(size: int, num_bytes: float) -> None:
    costs: CostModel = BandwidthOnly(bandwidth=2.0)
    groups = (tuple(range(size)),)
    assert costs.collective("all_gather", num_bytes, groups) == pytest.approx(
        num_bytes * (size - 1) / size / 2
    )
    assert costs.collective("all_reduce", num_bytes, groups) == pytest.approx(
        2 * costs.collective("all_gather", num_bytes, groups)
    )
    assert costs.collective("collective_permute", num_bytes, ((0, 1), (1, 0))) == pytest.approx(
        num_bytes / 2
    )
    assert (
        costs.collective("collective_permute", num_bytes, ((0, 0),))
        == costs.collective("all_reduce", num_bytes, ((0,),))
        == 0
    )


def test_compute_is_free_under_bandwidth_only_without_flop_per_s() -> None:
    kernel = Kernel("dot", "gemm", 6.0, 1e9)
    assert BandwidthOnly().kernel(kernel) == 0
    assert BandwidthOnly(flop_per_s=3.0).kernel(kernel) == 2
