"""Clusters of several pools: files, numbering of devices, and costs."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.cost_model import ClusterCosts, HeterogeneousCosts, costs_of
from simulator.engine.breakdown import predict
from simulator.engine.clock import Clock
from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.cluster_paths import cluster_names, heterogeneous_cluster_names
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import HeterogeneousCluster, load_cluster
from simulator.memory import MemoryUse
from simulator.program import Program, Recv, Run, Send
from simulator.work import CollectiveKind, Gemm, Groups, Kernel

V100, A100 = Cluster.load("p3.16xlarge"), Cluster.load("dgx_a100_40")
MIXED = HeterogeneousCluster(name="both", description="one host of each", pools=(V100, A100))
PRODUCT = Kernel(
    "matmul",
    "gemm",
    flops=2 * 4096**3,
    bytes=3 * 2 * 4096**2,
    dtype="f16",
    gemm=Gemm(4096, 4096, 4096),
)
FILE = {
    "name": "toy",
    "description": "two hosts of four beside one of two",
    "source": "made up",
    "device": "a100_sxm4_40gb",
    "nics_per_host": 2,
    "collective_launch_us": 0,
    "intra_host": {"bandwidth_gb_per_s": 100, "latency_us": 0},
    "inter_host": {"bandwidth_gb_per_s": 10, "latency_us": 0},
    "pools": [
        {"hosts": 2, "devices_per_host": 4},
        {"hosts": 1, "devices_per_host": 2, "device": "v100_sxm2_16gb"},
    ],
}


def load(folder: Path, **changes: object) -> HeterogeneousCluster:
    path = folder / "toy.yaml"
    path.write_text(
        yaml.safe_dump(
            {key: value for key, value in (FILE | changes).items() if value != "left out"}
        )
    )
    cluster = load_cluster(path)
    assert isinstance(cluster, HeterogeneousCluster)
    return cluster


# Files


@pytest.mark.parametrize("name", heterogeneous_cluster_names())
def test_every_shipped_heterogeneous_cluster_loads_and_has_the_name_of_its_file(name: str) -> None:
    cluster = load_cluster(name)
    assert isinstance(cluster, HeterogeneousCluster)
    assert cluster.name == name
    assert len({pool.name for pool in cluster.pools}) == len(cluster.pools)
    assert name not in cluster_names()


def test_pools_of_shipped_clusters_differ_in_gpu_or_number_of_devices() -> None:
    pools = {
        name: [(pool.device.name, pool.num_devices) for pool in load_cluster(name).pools]
        for name in heterogeneous_cluster_names()
    }
    a100 = "NVIDIA A100-SXM4-40GB"
    assert pools == {
        "a2_uneven": [(a100, 8), (a100, 4)],
        "p3_beside_p4d": [("Tesla V100-SXM2-16GB", 8), (a100, 8)],
    }


def test_load_cluster_also_loads_clusters_of_equal_hosts() -> None:
    assert load_cluster("p3.16xlarge") == V100 == V100.pools[0]
    assert V100.pool_of((0, 7)) == 0


def test_a_pool_inherits_the_fields_of_its_file(tmp_path: Path) -> None:
    first, second = load(tmp_path).pools
    assert (first.hosts, first.devices_per_host, first.nics_per_host) == (2, 4, 2)
    assert (first.device, second.device) == (A100.device, V100.device)
    assert first.inter_host == second.inter_host == Link(bandwidth_gb_per_s=10, latency_us=0)
    assert [pool.name for pool in (first, second)] == ["toy, pool 0", "toy, pool 1"]


def test_a_pool_may_inherit_the_fields_of_another_cluster(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(FILE | {"pools": None, "hosts": 3, "devices_per_host": 4})
    )
    text = (tmp_path / "mine.yaml").read_text().replace("pools: null\n", "")
    (tmp_path / "mine.yaml").write_text(text)
    pools = [{"like": "p3.16xlarge", "hosts": 2}, {"like": "mine.yaml", "nics_per_host": 4}]
    first, second = load(tmp_path, pools=pools).pools
    assert first == V100.with_size(hosts=2)
    assert (second.hosts, second.devices_per_host, second.nics_per_host) == (3, 4, 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pools": []}, "pools: given 0, expected at least 2"),
        ({"pools": [{"hosts": 1, "devices_per_host": 2}]}, "pools: given 1, expected at least 2"),
        (
            {"pools": {"hosts": 1}},
            "pools: given {'hosts': 1}; expected a list of sections with the fields of a cluster",
        ),
        ({"pools": ["p3.16xlarge"]}, "pools: given ['p3.16xlarge']; expected a list of sections"),
        (
            {"pools": [FILE["pools"][0], {"hosts": 1}]},  # pyright: ignore[reportIndexIssue]
            "pools.1: devices_per_host: missing; expected a whole number",
        ),
        (
            {"inter_hosts": {}},
            "pools.0: inter_hosts: unknown field (given {}); did you mean 'inter_host'?",
        ),
        ({"device": "v1000"}, "device: unknown device 'v1000'"),
        (
            {"inter_host": "left out", "pools": [{"hosts": 1, "devices_per_host": 2}] * 2},
            "pools.0.inter_host: missing, but there are other pools; describe the link of its NICs",
        ),
        ({"pools": [{"like": "p4"}] * 2}, "unknown cluster 'p4'; expected one of "),
        (
            {"pools": [{"like": "p3_beside_p4d"}] * 2},
            "p3_beside_p4d.yaml: has pools, so its hosts are not all alike",
        ),
        ({"name": "left out"}, "name: missing; expected a text"),
    ],
)
def test_the_error_of_a_wrong_file_has_the_pool_and_the_expectation(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(ClusterError, match=re.escape(expected)):
        load(tmp_path, **changes)


def test_loading_a_heterogeneous_file_as_a_cluster_is_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"p3_beside_p4d\.yaml: has pools.*simulator\.load_cluster reads it"
    ):
        Cluster.load("p3_beside_p4d")


# Devices


def test_devices_are_numbered_in_the_order_of_pools(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    assert (cluster.num_devices, cluster.pool_starts) == (10, (0, 8))
    assert [cluster.pool_of((device,)) for device in range(10)] == [0] * 8 + [1] * 2
    with pytest.raises(
        ClusterError,
        match=r"7, 8 lie in several pools .* 0 to 7 \(NVIDIA A100.*8 to 9 \(Tesla V100",
    ):
        cluster.pool_of((7, 8))
    with pytest.raises(
        ClusterError, match="devices 9 to 10 are not all in cluster 'toy': it has 10"
    ):
        cluster.pool_of((9, 10))


def test_the_first_devices_are_whole_pools_and_a_part_of_the_next(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    assert cluster.first_devices(10) == cluster
    assert cluster.first_devices(8) == cluster.pools[0]
    assert cluster.first_devices(3) == cluster.pools[0].with_size(1, 3)
    nine = cluster.first_devices(9)
    assert isinstance(nine, HeterogeneousCluster)
    assert nine.pools == (cluster.pools[0], cluster.pools[1].with_size(1, 1))
    for count in (0, 11):
        with pytest.raises(ClusterError, match=f"{count} devices asked of 'toy', which has 10"):
            cluster.first_devices(count)


# Costs


def test_costs_of_a_pool_are_those_of_its_cluster() -> None:
    costs = costs_of(MIXED)
    assert costs.kernel(PRODUCT, 7) == ClusterCosts(V100).kernel(PRODUCT)
    assert (
        costs.kernel(PRODUCT, 8)
        == ClusterCosts(A100).kernel(PRODUCT)
        < 0.5 * costs.kernel(PRODUCT, 7)
    )
    four = tuple(range(4))
    second = tuple(8 + i for i in four)
    assert costs.collective("all_reduce", 1e8, (second,)) == ClusterCosts(A100).collective(
        "all_reduce", 1e8, (four,)
    )


def test_a_message_between_pools_has_the_bandwidth_of_the_slower_nic(tmp_path: Path) -> None:
    fast = {
        "hosts": 1,
        "devices_per_host": 4,
        "nics_per_host": 4,
        "inter_host": {"bandwidth_gb_per_s": 40, "latency_us": 7},
    }
    slow = {"hosts": 1, "devices_per_host": 4, "nics_per_host": 1}  # 10 GB/s, no latency
    costs = HeterogeneousCosts(load(tmp_path, pools=[fast, slow]))
    assert costs.collective("collective_permute", 1e9, ((0, 4),)) == pytest.approx(0.1)
    assert costs.collective("collective_permute", 1e9, ((4, 0),)) == pytest.approx(0.1)
    # Four messages leave by four NICs and arrive at one.
    assert costs.collective(
        "collective_permute", 1e9, tuple((i, 4 + i) for i in range(4))
    ) == pytest.approx(0.4)
    # Four messages to one device of the fast host share its NIC (4 x 1 GB at 40 GB/s), but leave by
    # the slow one.
    assert costs.collective(
        "collective_permute", 1e9, tuple((4 + i, 0) for i in range(4))
    ) == pytest.approx(0.4)
    both_ways = ((0, 4), (5, 1))  # links are full duplex
    assert costs.collective("collective_permute", 1e9, both_ways) == pytest.approx(0.1)
    # the other message stays in the fast host and ends first
    assert costs.collective("collective_permute", 1e9, ((0, 4), (1, 2))) == pytest.approx(0.1)


def test_a_collective_over_several_pools_is_refused() -> None:
    with pytest.raises(ClusterError, match="devices 0, 8 lie in several pools of cluster 'both'"):
        costs_of(MIXED).collective("all_reduce", 1e6, ((0, 8),))


kinds = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])


@given(kinds, st.sampled_from([1, 2, 4, 8]), st.integers(0, 1), st.floats(1, 1e9))
def test_collectives_in_a_pool_cost_what_they_cost_on_its_cluster(
    kind: CollectiveKind, size: int, pool: int, num_bytes: float
) -> None:
    groups = tuple(tuple(range(first, first + size)) for first in range(0, 8, size))
    shifted: Groups = tuple(tuple(8 * pool + device for device in group) for group in groups)
    own = ClusterCosts((V100, A100)[pool])
    assert costs_of(MIXED).collective(kind, num_bytes, shifted) == own.collective(
        kind, num_bytes, groups
    )


@given(st.permutations(range(16)), st.floats(1, 1e9))
def test_messages_between_equal_pools_cost_what_they_cost_between_hosts(
    order: list[int], num_bytes: float
) -> None:
    """No message stays in its host; such a message would have the latency of another link."""
    pairs = tuple((a, b) for a, b in zip(range(16), order, strict=True) if (a < 8) != (b < 8))
    if pairs:
        equal = HeterogeneousCluster(name="two", description="", pools=(V100, V100))
        together = ClusterCosts(V100.with_size(hosts=2))
        assert costs_of(equal).collective("collective_permute", num_bytes, pairs) == pytest.approx(
            together.collective("collective_permute", num_bytes, pairs)
        )


def test_tasks_run_at_the_speed_of_their_pool() -> None:
    """A V100 computes a product and sends 1 GB to an A100, which computes the same product."""
    rows = ((Run(0, "F", 0), Send("x", 1, int(1e9))), (Recv("x", 0), Run(1, "F", 0)))
    program = Program(((0,), (8,)), rows, {"0F": (PRODUCT,), "1F": (PRODUCT,)})
    first, second = (ClusterCosts(cluster).kernel(PRODUCT) for cluster in (V100, A100))
    sending = (7.1 + 30) * 1e-6 + 1e9 / 2.8e9  # by the NIC of the V100s
    assert simulate(program, MIXED).makespan == pytest.approx(first + sending + second)
    with pytest.raises(ValueError, match="cluster 'both' has devices 0 to 15"):
        simulate(Program(((16,),), ((),)), MIXED)


@pytest.mark.parametrize("dispatch", [0.0, 1e-3])
def test_the_clock_and_predictions_use_the_costs_of_each_pool(dispatch: float) -> None:
    rows = ((Run(0, "F", 0), Send("x", 1, int(1e6))), (Recv("x", 0), Run(1, "F", 0)))
    memory = MemoryUse(arguments=int(12e9)), MemoryUse(arguments=int(20e9))
    program = Program(((0, 1), (8,)), rows, {"0F": (PRODUCT,), "1F": (PRODUCT,)}, memory)
    prediction = predict(program, MIXED, dispatch=dispatch)
    assert Clock.of(program).makespan(costs_of(MIXED), dispatch) == pytest.approx(
        prediction.seconds
    )
    assert prediction.peak_flop_per_s == 2 * 125e12 + 312e12
    assert (
        prediction.memory.capacity == V100.device.memory_bytes
    )  # with less free memory than the A100


def test_devices_of_different_pools_are_on_different_hosts() -> None:
    assert [MIXED.host_of(device) for device in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [load_cluster("a2_uneven").host_of(device) for device in (7, 11)] == [0, 1]


def test_every_mesh_must_fit_on_its_own_devices() -> None:
    used = MemoryUse(arguments=int(30e9)), MemoryUse(arguments=int(10e9))
    assert Timeline((), ((8, 9), (0, 1)), used).fits(MIXED)
    assert not Timeline((), ((0, 1), (8, 9)), used).fits(MIXED)


def test_memory_fits_as_that_of_a_fuller_device_with_a_smaller_reserve_only_if_both_fit() -> None:
    small = A100.device.model_copy(update={"memory_gb": 20.0, "reserve_gb": 2.0})
    large = A100.device.model_copy(update={"memory_gb": 40.0, "reserve_gb": 1.0})
    cluster = HeterogeneousCluster(
        name="both",
        description="",
        pools=(
            A100.model_copy(update={"device": large}),
            A100.model_copy(update={"device": small}),
        ),
    )
    for used, fits in ((17, True), (19, False)):  # of 18 usable; 38.5 of 39 are a larger fraction
        memory = MemoryUse(arguments=int(38.5e9)), MemoryUse(arguments=int(used * 1e9))
        rows = ((Run(0, "F", 0),), (Run(1, "F", 0),))
        program = Program(((0,), (8,)), rows, {"0F": (PRODUCT,), "1F": (PRODUCT,)}, memory)
        prediction = predict(program, cluster)
        assert prediction.timeline is not None
        assert prediction.memory.fits == prediction.timeline.fits(cluster) == fits
