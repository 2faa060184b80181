"""Collectives: size curves, shared NICs, algorithms, and fits to measured tables."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration.fit_collectives import MeasuredCollectives, fit_curve, fit_switch
from simulator.calibration.measured_samples import DATA, measured_collectives
from simulator.costs.collective_model import CollectiveModel
from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.collective_profile import SizeCurve, SwitchCurve, sent_fraction
from simulator.hardware.topology import Ring, find_routes, strided_ring
from simulator.work import CollectiveKind

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def a100(hosts: int) -> Cluster:
    return Cluster.load("dgx_a100_80").with_size(hosts)


def test_a_size_curve_equals_its_formula() -> None:
    curve = SizeCurve(
        launch_us=5.0, hop_us=1.0, half_size_mb=4.0, bandwidth_gb_per_s=100.0, small_group_loss=0.4
    )
    # 4 devices take 2 * 3 hops and send 1.5 * 6 MB = 9 MB each; the ramp adds sqrt(9 * 4) = 6 MB,
    # and a tenth of the bandwidth is lost.
    assert curve.seconds("all_reduce", 6e6, 4) == pytest.approx(5e-6 + 6e-6 + 15e6 / 90e9)


def test_members_of_a_shared_machine_divide_its_bandwidth() -> None:
    curve = SizeCurve(
        launch_us=5.0,
        member_us=10.0,
        hop_us=0.0,
        half_size_mb=0.0,
        bandwidth_gb_per_s=8.0,
        sharing=1.0,
    )
    # 5 us for the launch and 10 us for each member but the first
    assert curve.seconds("collective_permute", 0.0, 8) == pytest.approx(75e-6)
    assert [curve.bandwidth(size) for size in (2, 4, 8)] == [8e9, 4e9, 2e9]


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_a_strided_ring_equals_the_rings_of_its_groups(size: int, stride: int) -> None:
    cluster = a100(32)
    block = size * stride
    groups = tuple(
        tuple(first + i * stride for i in range(size))
        for start in range(0, 256, block)
        for first in range(start, start + stride)
    )
    assert {strided_ring(cluster, size, stride)} == find_routes(cluster, "all_reduce", groups)


def test_groups_that_share_nics_divide_their_bandwidth() -> None:
    # Data parallelism over 16 hosts: each of 8 groups of 16 with stride 8 has one NIC, each of 2
    # groups of 64 with stride 2 has four.
    network = CollectiveModel(a100(16))
    assert network.ring(16, 8) == Ring(16, 16, 1, 1.0)
    assert network.ring(64, 2) == Ring(64, 16, 4, 4.0)
    few_cards = CollectiveModel(a100(16).model_copy(update={"nics_per_host": 4}))
    assert few_cards.seconds("all_reduce", 4e9, few_cards.ring(64, 2)) == pytest.approx(
        2 * network.seconds("all_reduce", 4e9, network.ring(64, 2)), rel=0.02
    )


@pytest.mark.parametrize(("size", "stride"), [(8, 3), (3, 1), (6, 4), (16, 3)])
def test_groups_that_do_not_fill_hosts_take_as_long_as_the_slowest(size: int, stride: int) -> None:
    cluster = a100(12)
    span = size * stride
    groups = tuple(
        tuple(range(start + offset, start + offset + span, stride))
        for start in range(0, cluster.num_devices - span + 1, span)
        for offset in range(stride)
    )
    network = CollectiveModel(cluster)
    slowest = network.collective_seconds(
        "all_gather", 1e9, find_routes(cluster, "all_gather", groups)
    )
    ring = strided_ring(cluster, size, stride)
    assert network.seconds("all_gather", 1e9, ring) == pytest.approx(slowest, rel=1e-2)


def test_a_group_of_64_in_domains_of_72_has_the_nics_of_its_smaller_part() -> None:
    rack = Cluster.load("gb200_nvl72").with_size(4)
    # devices 64 to 127: eight in the first rack
    assert strided_ring(rack, 64, 1) == Ring(64, 2, 56, 8.0)
    assert strided_ring(rack, 72, 1).hosts == 1
    assert strided_ring(rack, 8, 1).hosts == 1


def test_a_collective_in_one_host_does_not_depend_on_other_hosts() -> None:
    assert CollectiveModel(a100(1)).seconds("all_reduce", 1e9, strided_ring(a100(1), 1, 1)) == 0.0
    one, two = CollectiveModel(a100(1)), CollectiveModel(a100(2))
    assert one.seconds("all_gather", 1e9, one.ring(8)) == two.seconds(
        "all_gather", 1e9, two.ring(8)
    )


@pytest.mark.parametrize("name", ["dgx_a100_80", "dgx_h100", "dgx_b200", "gb200_nvl72"])
def test_the_error_on_held_out_collectives_is_small(name: str) -> None:
    """The mean is over the held-out rows of four kinds; all_to_all of GB200 is worst with 27 %."""
    cluster = Cluster.load(name)
    network, errors = CollectiveModel(cluster), []
    for kind in KINDS:
        measured = measured_collectives(cluster.device.name, kind)
        held_out = measured[measured.held_out()]
        rows = zip(held_out.size.tolist(), held_out.num_bytes.tolist(), strict=True)
        predicted = [
            network.seconds(kind, num_bytes, network.ring(size)) for size, num_bytes in rows
        ]
        errors += [abs(np.array(predicted) / held_out.seconds - 1)]
    assert np.concatenate(errors).mean() < {"dgx_b200": 0.10, "gb200_nvl72": 0.15}.get(name, 0.075)


def fastest(network: CollectiveModel, num_bytes: float, size: int) -> str:
    seconds = network.seconds_by_algorithm("all_reduce", num_bytes, network.ring(size))
    assert network.seconds("all_reduce", num_bytes, network.ring(size)) == min(seconds.values())
    return min(seconds, key=seconds.__getitem__)


def test_short_all_reduces_over_many_hosts_use_trees_and_long_ones_rings() -> None:
    network = CollectiveModel(a100(16))
    assert [fastest(network, size, 128) for size in (2**20, 2**32)] == ["tree", "ring"]
    # A tree goes up and down: 7 hops within a host and 4 levels of hosts of 24 us, each way.
    seconds = network.seconds_by_algorithm("all_reduce", 0.0, network.ring(128))
    curve = network.curves.all_reduce
    assert seconds["tree"] == pytest.approx(
        (curve.launch_us + 2 * (7 * curve.hop_us + 4 * 24)) * 1e-6
    )
    assert seconds["ring"] == pytest.approx(
        (curve.launch_us + 2 * (112 * curve.hop_us + 16 * 24)) * 1e-6
    )
    # Twice the array through 8 NICs of 24.2 GB/s, at 0.92 of their bandwidth.
    long = network.seconds_by_algorithm("all_reduce", 1e12, network.ring(128))["tree"]
    assert long == pytest.approx(2e12 / 0.92 / (8 * 24.2e9), rel=0.01)


def test_long_all_reduces_of_eight_devices_use_a_reducing_switch() -> None:
    h100 = CollectiveModel(Cluster.load("dgx_h100"))
    assert [fastest(h100, size, 8) for size in (2**20, 2**30)] == ["ring", "nvls"]
    # each of two devices receives one array, by a ring as by the switch
    assert fastest(h100, 2**30, 2) == "ring"
    assert fastest(CollectiveModel(a100(1)), 2**30, 8) == "ring"
    assert "nvls" not in h100.seconds_by_algorithm("all_gather", 2**30, h100.ring(8))


def test_two_hosts_with_reducing_switches_send_sums_once_and_more_hosts_twice() -> None:
    networks = {
        hosts: CollectiveModel(Cluster.load("dgx_h100").with_size(hosts)) for hosts in (2, 4)
    }
    assert fastest(networks[2], 2**33, 16) == "nvls_tree"
    assert fastest(networks[4], 2**33, 32) == "ring"
    for hosts, times in ((2, 1), (4, 2)):
        network = networks[hosts]
        seconds = network.seconds_by_algorithm("all_reduce", 1e12, network.ring(8 * hosts))[
            "nvls_tree"
        ]
        switch = network.curves.nvls
        assert switch is not None
        assert seconds == pytest.approx(
            max(times * 1e12 / (8 * 48.3e9), switch.seconds(1e12, 8)), rel=1e-3
        )


def test_the_fit_of_a_switch_recovers_planted_parameters() -> None:
    ring = SizeCurve(launch_us=5, hop_us=1, half_size_mb=4, bandwidth_gb_per_s=400)
    planted = SwitchCurve(launch_us=50, half_size_mb=2, bandwidth_gb_per_s=300)
    moved = 2.0 ** np.arange(9, 34)
    exact = [min(planted.seconds(b, 8), ring.seconds("all_reduce", b, 8)) for b in moved.tolist()]
    assert exact[0] == ring.seconds("all_reduce", 512.0, 8)
    fitted = fit_switch(
        MeasuredCollectives.of("all_reduce", np.full(len(moved), 8), moved, exact), ring
    )
    assert fitted.bandwidth_gb_per_s == pytest.approx(300, rel=0.02)
    assert fitted.launch_us == pytest.approx(50, rel=0.1)


def test_the_bandwidth_between_hosts_grows_with_size_as_in_simai() -> None:
    # Assumptions: NICs of 400 Gb/s, and rings, because the times grow with the number of hosts.
    wide = pd.read_csv(DATA / "simai_nic_ratio.csv").drop(columns="1")
    table = wide.melt("bytes", var_name="hosts", value_name="ratio").astype({"hosts": int})
    table = table[table.ratio > 0.2]
    errors = []
    for hosts, num_bytes, ratio in table[["hosts", "bytes", "ratio"]].itertuples(index=False):
        network = CollectiveModel(Cluster.load("dgx_h100").with_size(int(hosts)))
        ring = network.ring(8 * int(hosts))
        seconds = network.seconds_by_algorithm("all_reduce", num_bytes, ring)["ring"]
        errors.append(
            sent_fraction("all_reduce", ring.size) * num_bytes / seconds / 400e9 / ratio - 1
        )
    assert np.mean(np.abs(errors)) < 0.06
    assert abs(np.mean(errors)) < 0.03


@given(
    st.integers(0, 3), st.floats(1, 50), st.floats(0.1, 5), st.floats(0.1, 20), st.floats(10, 800)
)
def test_the_fit_of_a_curve_recovers_planted_parameters(
    kind: int, launch: float, hop: float, half: float, speed: float
) -> None:
    planted = SizeCurve(
        launch_us=launch,
        hop_us=hop,
        half_size_mb=half,
        bandwidth_gb_per_s=speed,
        small_group_loss=0.3,
    )
    sizes, moved = np.meshgrid([2, 4, 8], 2.0 ** np.arange(9, 31))
    sizes, moved = sizes.ravel(), moved.ravel()
    exact = [
        planted.seconds(KINDS[kind], b, n)
        for n, b in zip(sizes.tolist(), moved.tolist(), strict=True)
    ]
    fitted = fit_curve(MeasuredCollectives.of(KINDS[kind], sizes, moved, exact))
    assert fitted.bandwidth_gb_per_s == pytest.approx(speed, rel=0.05)
    assert fitted.launch_us + fitted.hop_us == pytest.approx(launch + hop, rel=0.05)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"]
)
def test_the_fit_of_a_curve_recovers_planted_sharing(
    kind: CollectiveKind,
) -> None:
    """Virtual devices share one memory, and one more member costs 20 us; errors are 5 %."""
    planted = SizeCurve(
        launch_us=10, member_us=20, hop_us=0, half_size_mb=1e-3, bandwidth_gb_per_s=7, sharing=0.9
    )
    sizes, moved = np.meshgrid([2, 4, 8], 2.0 ** np.arange(10, 24))
    sizes, moved = sizes.ravel(), moved.ravel()
    exact = np.array(
        [planted.seconds(kind, b, n) for n, b in zip(sizes.tolist(), moved.tolist(), strict=True)]
    )
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal(len(exact)))
    fitted = fit_curve(MeasuredCollectives.of(kind, sizes, moved, exact * noise))
    assert fitted.sharing == pytest.approx(0.9, abs=0.1)
    assert fitted.group_bandwidth_gb_per_s == {}
    assert fitted.held_out_error is not None
    assert fitted.held_out_error < 0.1
    predicted = [fitted.seconds(kind, 0.0, n) for n in (2, 4, 8)]
    assert predicted == pytest.approx([planted.seconds(kind, 0.0, n) for n in (2, 4, 8)], rel=0.15)


def test_links_without_a_switch_have_a_bandwidth_per_group_size() -> None:
    # The V100s of a p3.16xlarge form a cube mesh, whose published description was written by hand.
    fitted = fit_curve(measured_collectives("Tesla V100-SXM2-16GB", "all_reduce"))
    measured = Cluster.load("p3.16xlarge").collectives
    assert measured is not None
    assert fitted.held_out_error is not None
    assert fitted.held_out_error < 0.05
    assert set(fitted.group_bandwidth_gb_per_s) == {2, 4, 8}
    for size, bandwidth in fitted.group_bandwidth_gb_per_s.items():
        assert bandwidth == pytest.approx(measured.all_reduce.bandwidth(size) / 1e9, rel=0.05)


@given(st.sampled_from(KINDS), st.integers(0, 3), st.floats(0, 1e10), st.floats(1, 4))
def test_faster_networks_are_never_slower(
    kind: CollectiveKind, log_hosts: int, num_bytes: float, faster: float
) -> None:
    cluster = a100(2**log_hosts)
    inter = cluster.inter_host
    assert inter is not None
    faster_link = Link(
        bandwidth_gb_per_s=inter.bandwidth_gb_per_s * faster, latency_us=inter.latency_us / faster
    )
    size = 8 * 2**log_hosts
    slow, fast = (
        CollectiveModel(cluster),
        CollectiveModel(cluster.model_copy(update={"inter_host": faster_link})),
    )
    assert (
        0
        <= fast.seconds(kind, num_bytes, fast.ring(size))
        <= slow.seconds(kind, num_bytes, slow.ring(size))
    )


def test_no_row_is_held_out_of_few_measurements() -> None:
    moved = 2.0 ** np.arange(10, 30)
    rows = MeasuredCollectives.of("collective_permute", np.full(len(moved), 2), moved, moved * 1e-9)
    is_held_out = rows.held_out()
    assert 0 < is_held_out.sum() < len(moved) - 5
    few = rows[np.concatenate([np.flatnonzero(~is_held_out)[:4], np.flatnonzero(is_held_out)[:1]])]
    assert not few.held_out().any()
    assert fit_curve(few).held_out_error is None


def test_a_fit_to_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="1 collectives to fit; expected at least 5"):
        fit_curve(MeasuredCollectives.of("all_reduce", [2], [1e6], [1e-3]))
    with pytest.raises(ValueError, match="1 all_reduces to fit; expected at least 3"):
        fit_switch(MeasuredCollectives.of("all_reduce", [8], [1e6], [1e-3]), None)
    with pytest.raises(ValueError, match="2 sizes and 1 times"):
        MeasuredCollectives.of("all_reduce", [2, 4], [1e6, 1e6], [1e-3])
