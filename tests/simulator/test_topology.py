"""Routes through leaf switches, rails, and the ports that devices of a host share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.collective_model import CollectiveModel
from simulator.costs.cost_model import ClusterCosts
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.description import ClusterError
from simulator.hardware.topology import find_routes, strided_ring
from simulator.program import Program, Recv, Send
from simulator.transformer import Execution, Transformer, predict
from simulator.transformer.machine import Machine
from simulator.transformer.scenario_files import load_for_program
from simulator.transformer.what_if import Change
from simulator.work import CollectiveKind, Groups
from tests.simulator.toy_clusters import BASE, toy_cluster


def toy(**changes: object) -> Cluster:
    """Return a toy cluster of four hosts with two devices and a NIC for each device."""
    return toy_cluster(**{"hosts": 4, "devices_per_host": 2} | changes)


LEAVES = toy(hosts_per_switch=2, oversubscription=4)
RAILS = toy(rails=True, oversubscription=4)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all_gather", ((0, 2),), 1 / 2 / 10),  # hosts 0 and 1 are on one switch
        ("all_gather", ((0, 4),), 1 / 2 / 2.5),  # hosts 0 and 2 are on two switches
        ("all_gather", ((0, 2), (1, 5)), 1 / 2 / 2.5),  # the slower group counts
        ("all_reduce", ((0, 2, 4, 6),), 2 * 3 / 4 / 2.5),
        ("all_gather", ((0, 1, 2, 3),), 3 / 4 / 20),  # over both NICs
        ("all_gather", ((0, 1, 4, 5),), 3 / 4 / 5),
        ("collective_permute", ((0, 2),), 1 / 10),
        ("collective_permute", ((0, 4),), 1 / 2.5),
        # Each device has 3/4 GB for the others, which takes 0.075 s. 1/2 GB of it goes to the other
        # switch, which takes longer.
        ("all_to_all", ((0, 2, 4, 6),), 1 / 2 / 2.5),
    ],
)
def test_traffic_that_leaves_a_leaf_switch_has_less_bandwidth(
    kind: CollectiveKind, groups: Groups, seconds: float
) -> None:
    assert ClusterCosts(LEAVES).collective(kind, 1e9, groups) == pytest.approx(seconds)


def test_an_all_to_all_mostly_on_one_switch_has_the_bandwidth_of_nics() -> None:
    # Each device sends 7 of 8 parts over its NIC; 4 of these leave the switch at 10 / 1.1 GB/s.
    slightly = toy(
        hosts=8, devices_per_host=1, nics_per_host=1, hosts_per_switch=4, oversubscription=1.1
    )
    assert ClusterCosts(slightly).collective(
        "all_to_all", 1e9, (tuple(range(8)),)
    ) == pytest.approx(7 / 8 / 10)


def test_uplinks_are_shared_by_the_messages_of_a_nic() -> None:
    costs = ClusterCosts(LEAVES.model_copy(update={"nics_per_host": 1}))
    assert costs.collective("collective_permute", 1e9, ((0, 2), (1, 3))) == pytest.approx(2 / 10)
    assert costs.collective("collective_permute", 1e9, ((0, 2), (1, 4))) == pytest.approx(4 / 10)
    assert costs.collective("collective_permute", 1e9, ((0, 5), (1, 4))) == pytest.approx(8 / 10)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        # the first NICs of all hosts are on one switch
        ("all_gather", ((0, 2, 4, 6),), 3 / 4 / 10),
        # a ring connects each NIC to the same one of the next host
        ("all_gather", ((0, 1, 2, 3),), 3 / 4 / 20),
        # from the first NIC of one host to the second one of the other
        ("all_gather", ((0, 3),), 1 / 2 / 2.5),
        ("collective_permute", ((0, 2),), 1 / 10),
        ("collective_permute", ((0, 3),), 1 / 2.5),
        # a message for the other NIC reaches it within the host
        ("all_to_all", ((0, 1, 2, 3),), 2 * 2 / 4 / 20),
    ],
)
def test_traffic_along_a_rail_stays_on_its_switch(
    kind: CollectiveKind, groups: Groups, seconds: float
) -> None:
    assert ClusterCosts(RAILS).collective(kind, 1e9, groups) == pytest.approx(seconds)


def test_rails_are_limited_to_the_hosts_of_a_switch() -> None:
    costs = ClusterCosts(toy(rails=True, hosts_per_switch=2, oversubscription=4))
    assert costs.collective("collective_permute", 1e9, ((0, 2),)) == pytest.approx(1 / 10)
    assert costs.collective("collective_permute", 1e9, ((0, 4),)) == pytest.approx(1 / 2.5)


PORTS = toy(hosts=1, devices_per_host=4, nics_per_host=1, bridges_per_host=2)
CROSSING, SEPARATE = ((0, 2), (1, 3)), ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all_gather", ((0, 1, 2, 3),), 3 / 4 / 100),  # one ring, once through each port
        ("all_gather", SEPARATE, 1 / 2 / 100),  # below the ports
        ("all_gather", CROSSING, 2 * 1 / 2 / 100),  # two rings through each port
        ("all_gather", CROSSING[:1], 1 / 2 / 100),
        ("all_reduce", CROSSING, 2 * 1 / 100),
        ("collective_permute", SEPARATE, 1 / 100),
        ("collective_permute", CROSSING, 2 / 100),
        ("collective_permute", ((0, 2), (2, 0)), 1 / 100),  # in and out
        # two devices send half of their arrays to the other port
        ("all_to_all", ((0, 1, 2, 3),), 2 * 2 / 4 / 100),
    ],
)
def test_devices_share_the_link_of_their_port(
    kind: CollectiveKind, groups: Groups, seconds: float
) -> None:
    assert ClusterCosts(PORTS).collective(kind, 1e9, groups) == pytest.approx(seconds)


def test_rings_over_hosts_share_ports_within_hosts() -> None:
    # With fast NICs, the two rings go through each port within each host; a quarter stays with each
    # device.
    costs = ClusterCosts(
        toy(
            hosts=2,
            devices_per_host=4,
            nics_per_host=4,
            bridges_per_host=2,
            inter_host=Link(bandwidth_gb_per_s=1e3, latency_us=0),
        )
    )
    groups = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert costs.collective("all_gather", 1e9, groups) == pytest.approx(2 * 3 / 4 / 100)
    assert costs.collective("all_gather", 1e9, groups[:1]) == pytest.approx(3 / 4 / 100)


@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize(
    ("size", "stride"),
    [
        (2, 1),
        (4, 1),
        (2, 2),
        (2, 4),
        (8, 1),
        (2, 8),
        (4, 4),
        (8, 2),
        (16, 1),
        (4, 8),
        (8, 8),
        (2, 32),
        (64, 1),
    ],
)
def test_a_strided_ring_equals_the_rings_of_its_groups(size: int, stride: int, rails: bool) -> None:
    cluster = toy(
        hosts=8,
        devices_per_host=8,
        nics_per_host=4,
        hosts_per_switch=4,
        oversubscription=3,
        bridges_per_host=2,
        rails=rails,
    )
    groups = tuple(
        tuple(first + offset + stride * i for i in range(size))
        for first in range(0, 64, size * stride)
        for offset in range(stride)
    )
    assert {strided_ring(cluster, size, stride)} == find_routes(cluster, "all_reduce", groups)


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize(
    ("hosts", "size", "stride"), [(3, 24, 1), (6, 24, 1), (6, 3, 16), (6, 3, 8), (9, 2, 12)]
)
def test_groups_that_divide_leaf_switches_unevenly_take_as_long_as_the_slowest(
    hosts: int, size: int, stride: int, kind: CollectiveKind
) -> None:
    cluster = toy(hosts=hosts, devices_per_host=8, hosts_per_switch=2, oversubscription=3)
    groups = tuple(
        tuple(first + offset + stride * i for i in range(size))
        for first in range(0, 8 * hosts, size * stride)
        for offset in range(stride)
    )
    model = CollectiveModel(cluster)
    slowest = model.collective_seconds(kind, 1e9, find_routes(cluster, kind, groups))
    assert model.seconds(kind, 1e9, strided_ring(cluster, size, stride)) == pytest.approx(slowest)


def test_scenarios_and_programs_have_the_same_seconds_per_message() -> None:
    message = 10**9
    for cluster, stride, seconds in (
        (LEAVES, 2, 0.4),
        (RAILS, 2, 0.1),
        (RAILS, 3, 0.4),
        (PORTS, 2, 0.02),
        (PORTS, 1, 0.01),
    ):
        assert CollectiveModel(cluster).send_seconds(message, stride) == pytest.approx(seconds)
        count = cluster.num_devices
        pairs = tuple((i, i + stride) for i in range(count - stride))
        assert ClusterCosts(cluster).collective(
            "collective_permute", message, pairs
        ) == pytest.approx(seconds)


def test_oversubscription_slows_scenarios_in_proportion() -> None:
    model = Transformer(layers=4, hidden=1024, heads=16, seq=1024, vocab=32000)
    plan = Execution(tensor=8, data=8, global_batch=64)
    fabric = {"hosts_per_switch": 4}
    machines = [
        Machine(BASE.with_size(8).model_copy(update=fabric | {"oversubscription": factor}))
        for factor in (1.0, 2.0, 4.0)
    ]
    exposed = [predict(model, plan, machine).exposed["data"] for machine in machines]
    # except for latency, the seconds are proportional to the oversubscription
    assert exposed[2] - exposed[1] == pytest.approx(2 * (exposed[1] - exposed[0]))
    assert exposed[1] > 1.7 * exposed[0]


def test_messages_of_two_meshes_share_the_uplink_of_a_nic() -> None:
    one_card = LEAVES.model_copy(update={"nics_per_host": 1})

    def seconds(to: int, other: int) -> float:
        rows = (Send("x", 2, 10**9),), (Send("y", 3, 10**9),), (Recv("x", 0),), (Recv("y", 1),)
        return simulate(Program(((0,), (1,), (to,), (other,)), rows), one_card).makespan

    assert seconds(2, 3) == pytest.approx(2 / 10)
    assert seconds(4, 6) == pytest.approx(8 / 10)
    # x would use all of the NIC and y a quarter. At 0.8 of their speed x arrives after 0.125 s, and
    # y, which has 0.3 s left, at 0.425 s.
    assert seconds(2, 4) == pytest.approx(0.425)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"oversubscription": 0.5, "hosts_per_switch": 2},
            "oversubscription.*greater than or equal to 1",
        ),
        ({"oversubscription": float("inf"), "hosts_per_switch": 2}, "oversubscription.*finite"),
        (
            {"oversubscription": 2},
            r"oversubscription: given 2, but all NICs are on one switch.*hosts_per_switch",
        ),
        ({"hosts_per_switch": 0}, "hosts_per_switch.*greater than 0"),
        ({"rails": 2}, "rails.*valid boolean"),
        (
            {"bridges_per_host": 3},
            "bridges_per_host: given 3, expected a divisor of devices_per_host, which is 2",
        ),
    ],
)
def test_invalid_networks_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        toy(**changes)


def test_a_part_of_a_host_has_fewer_bridges() -> None:
    four = toy(hosts=1, devices_per_host=8, nics_per_host=8, bridges_per_host=4)
    assert four.with_size(1, 4).bridges_per_host == 2
    assert four.with_size(1, 1).bridges_per_host == 1
    with pytest.raises(
        ClusterError,
        match="2 devices at each of its 4 bridges_per_host; "
        "3 devices per host would be spread unevenly",
    ):
        four.with_size(1, 3)


def test_what_ifs_change_the_network() -> None:
    changes = [
        Change.parse("cluster.hosts_per_switch=4"),
        Change.parse("cluster.oversubscription=2"),
    ]
    cluster = load_for_program("dgx_h100", 64, changes)
    assert (cluster.hosts_per_switch, cluster.oversubscription) == (4, 2)
    with pytest.raises(
        ClusterError, match=r"hosts_per_switch would change nothing.*cluster\.oversubscription=2"
    ):
        load_for_program("dgx_h100", 64, changes[:1])
    with pytest.raises(ValueError, match="all NICs are on one switch"):
        load_for_program("dgx_h100", 64, changes[1:])


@given(
    st.integers(1, 4),
    st.floats(1, 8),
    st.booleans(),
    st.sampled_from(["all_reduce", "all_gather", "all_to_all", "collective_permute"]),
)
def test_oversubscription_slows_by_at_most_its_factor(
    per_switch: int, factor: float, rails: bool, kind: CollectiveKind
) -> None:
    groups: Groups = (
        ((0, 3), (1, 6), (2, 5)) if kind == "collective_permute" else ((0, 2, 4), (1, 3, 6, 7))
    )
    plain, slower = (
        ClusterCosts(
            toy(hosts_per_switch=per_switch, rails=rails, oversubscription=oversubscription)
        ).collective(kind, 1e9, groups)
        for oversubscription in (1.0, factor)
    )
    assert plain <= slower * (1 + 1e-9)
    assert slower <= factor * plain * (1 + 1e-9)
