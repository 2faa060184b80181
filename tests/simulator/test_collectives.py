import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration.collectives import MeasuredCollectives, fit_curve
from simulator.cluster import Cluster, ClusterError, Link
from simulator.collective_profile import SizeCurve, sent_fraction
from simulator.collectives import Network
from simulator.network import Ring, find_routes, strided_ring
from simulator.validation.measurements import measured_collectives, network_ratios
from simulator.work import CollectiveKind

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200")


def a100(hosts: int) -> Cluster:
    return Cluster.load("dgx_a100_80").with_size(hosts)


def test_a_curve_is_its_formula() -> None:
    curve = SizeCurve(launch_us=5.0, hop_us=1.0, half_size_mb=4.0, bandwidth_gb_per_s=100.0, small_group_loss=0.4)
    # 4 devices: 2 * 3 hops, 1.5 * 6 MB = 9 MB sent each, sqrt(9 * 4) = 6 MB of ramp, a tenth of the bandwidth lost
    assert curve.seconds("all_reduce", 6e6, 4) == pytest.approx(5e-6 + 6e-6 + 15e6 / 90e9)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_strided_rings_are_those_of_the_groups_one_by_one(size: int, stride: int) -> None:
    cluster = a100(32)
    block = size * stride
    groups = tuple(
        tuple(first + i * stride for i in range(size))
        for start in range(0, 256, block)
        for first in range(start, start + stride)
    )
    assert {strided_ring(cluster, size, stride)} == find_routes(cluster, "all_reduce", groups)


def test_groups_that_share_the_cards_of_a_host_slow_each_other() -> None:
    # data parallelism over 16 hosts: 8 groups of 16 with stride 8 have a card each, 2 groups of 64 with stride 2 have four
    network = Network(a100(16))
    assert network.ring(16, 8) == Ring(16, 16, 1, 1.0)
    assert network.ring(64, 2) == Ring(64, 16, 4, 4.0)
    few_cards = Network(a100(16).model_copy(update={"nics_per_host": 4}))
    assert few_cards.seconds("all_reduce", 4e9, few_cards.ring(64, 2)) == pytest.approx(
        2 * network.seconds("all_reduce", 4e9, network.ring(64, 2)), rel=0.02
    )


def test_groups_that_do_not_fill_hosts_are_refused() -> None:
    with pytest.raises(ClusterError, match="groups of 8 devices that are 3 apart don't fill hosts of 8 devices evenly"):
        strided_ring(a100(3), 8, 3)


def test_the_time_of_an_all_reduce_does_not_depend_on_how_it_is_thought_about() -> None:
    assert Network(a100(1)).seconds("all_reduce", 1e9, strided_ring(a100(1), 1, 1)) == 0.0
    one, two = Network(a100(1)), Network(a100(2))
    assert one.seconds("all_gather", 1e9, one.ring(8)) == two.seconds("all_gather", 1e9, two.ring(8))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_error_on_collectives_that_nobody_fitted(gpu: str) -> None:
    """The mean over the held-out rows of the four kinds; all_to_all of H100 is the worst of them, with 14 %."""
    profile = Cluster.load({"A": "dgx_a100_80", "H": "dgx_h100", "B": "dgx_b200"}[gpu[7]]).curves
    assert profile.gpu == gpu
    errors = []
    for kind in KINDS:
        measured = measured_collectives(gpu, kind)
        errors += [abs(measured.errors(profile.curve(kind))[measured.held_out()])]
    assert np.concatenate(errors).mean() < (0.10 if gpu.endswith("B200") else 0.075)


def test_between_hosts_bandwidth_ramps_up_as_it_does_in_simai() -> None:
    # its cards are taken to be of 400 Gb/s; its times are those of rings, for they grow with the number of hosts
    table = network_ratios()
    table = table[table.ratio > 0.2]
    errors = []
    for hosts, num_bytes, ratio in table[["hosts", "bytes", "ratio"]].itertuples(index=False):
        network = Network(Cluster.load("dgx_h100").with_size(int(hosts)))
        ring = network.ring(8 * int(hosts))
        seconds = network.seconds_by_algorithm("all_reduce", num_bytes, ring)["ring"]
        errors.append(sent_fraction("all_reduce", ring.size) * num_bytes / seconds / 400e9 / ratio - 1)
    assert np.mean(np.abs(errors)) < 0.12
    assert abs(np.mean(errors)) < 0.08


@given(st.integers(0, 3), st.floats(1, 50), st.floats(0.1, 5), st.floats(0.1, 20), st.floats(10, 800))
def test_planted_alpha_and_beta_are_recovered(kind: int, launch: float, hop: float, half: float, speed: float) -> None:
    planted = SizeCurve(launch_us=launch, hop_us=hop, half_size_mb=half, bandwidth_gb_per_s=speed, small_group_loss=0.3)
    sizes, moved = np.meshgrid([2, 4, 8], 2.0 ** np.arange(9, 31))
    sizes, moved = sizes.ravel(), moved.ravel()
    exact = [planted.seconds(KINDS[kind], b, n) for n, b in zip(sizes.tolist(), moved.tolist(), strict=True)]
    fitted = fit_curve(MeasuredCollectives.of(KINDS[kind], sizes, moved, exact))
    assert fitted.bandwidth_gb_per_s == pytest.approx(speed, rel=0.05)
    assert fitted.launch_us + fitted.hop_us == pytest.approx(launch + hop, rel=0.05)


@given(st.sampled_from(KINDS), st.integers(0, 3), st.floats(0, 1e10), st.floats(1, 4))
def test_faster_networks_are_never_slower(
    kind: CollectiveKind, log_hosts: int, num_bytes: float, faster: float
) -> None:
    cluster = a100(2**log_hosts)
    inter = cluster.inter_host
    assert inter is not None
    quick = Link(bandwidth_gb_per_s=inter.bandwidth_gb_per_s * faster, latency_us=inter.latency_us / faster)
    size = 8 * 2**log_hosts
    slow, fast = Network(cluster), Network(cluster.model_copy(update={"inter_host": quick}))
    assert 0 <= fast.seconds(kind, num_bytes, fast.ring(size)) <= slow.seconds(kind, num_bytes, slow.ring(size))


def test_too_little_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 collectives to fit; expected at least 5"):
        fit_curve(MeasuredCollectives.of("all_reduce", [2], [1e6], [1e-3]))
    with pytest.raises(ValueError, match="2 sizes and 1 times"):
        MeasuredCollectives.of("all_reduce", [2, 4], [1e6, 1e6], [1e-3])
