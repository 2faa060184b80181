"""Contention at NICs: messages of several meshes share their bandwidth."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.cost_model import ClusterCosts, CostModel, costs_of
from simulator.engine.clock import Clock
from simulator.engine.nic_sharing import Message, NicSharing, shared_nics
from simulator.engine.simulation import shared_nics_of, simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster, Link
from simulator.hardware.heterogeneous import HeterogeneousCluster
from simulator.program import DeadlockError, Instruction, Program, Recv, Run, Send
from simulator.spans import Link as LinkClass
from simulator.spans import Stream
from simulator.work import Collective, Done, Groups, Kernel, OpList, Start
from tests.simulator.bodies import programs
from tests.toy_costs import BandwidthOnly

BASE = Cluster.load("p3.16xlarge")


def toy(hosts: int = 2, nics: int = 1, latency_us: float = 0.0) -> Cluster:
    """Return hosts of two devices at 100 GB/s with NICs of 1 GB/s; all else is free."""
    return BASE.with_size(hosts, 2).model_copy(
        update={
            "nics_per_host": nics,
            "collective_launch_us": 0.0,
            "collectives": None,
            "intra_host": Link(bandwidth_gb_per_s=100, latency_us=0),
            "inter_host": Link(bandwidth_gb_per_s=1, latency_us=latency_us),
        }
    )


def wait(seconds: float) -> Kernel:
    return Kernel("dot", "memory", 0, 0, seconds=seconds)


def send_times(timeline: Timeline) -> dict[str, object]:
    spans = [span for span in timeline.spans if span.category == "send"]
    return {span.name: (pytest.approx(span.start), pytest.approx(span.end)) for span in spans}


def two_sends(late: float = 0.0, num_bytes: int = 10**9) -> Program:
    """Return a program of two sends of 1 GB between two hosts, the second of which is late."""
    rows: tuple[tuple[Instruction, ...], ...] = (
        (Send("x", 2, 10**9),),
        (Run(0, "F"), Send("y", 3, num_bytes)),
        (Recv("x", 0),),
        (Recv("y", 1),),
    )
    return Program(((0,), (1,), (2,), (3,)), rows, {"0F": (wait(late),)})


def test_messages_of_two_meshes_through_one_nic_take_twice_as_long() -> None:
    assert send_times(simulate(two_sends(), toy(nics=2))) == {
        "send x>2": (0, 1),
        "send y>3": (0, 1),
    }
    timeline = simulate(two_sends(), toy(nics=1))
    assert send_times(timeline) == {"send x>2": (0, 2), "send y>3": (0, 2)}
    assert {arrow.value: arrow.received for arrow in timeline.arrows} == {"x": 2, "y": 2}


def test_messages_share_a_nic_only_while_they_overlap() -> None:
    # x has the NIC for 0.5 s; both have half of it for 1 s, in which x sends its other half; y has
    # it for 0.5 s.
    assert send_times(simulate(two_sends(late=0.5), toy())) == {
        "send x>2": (0, 1.5),
        "send y>3": (0.5, 2),
    }
    # y is small: it takes 0.4 s from 0.5 s on, and x sends its last 0.3 GB alone.
    assert send_times(simulate(two_sends(0.5, 2 * 10**8), toy())) == {
        "send x>2": (0, 1.2),
        "send y>3": (0.5, 0.9),
    }


def test_latency_is_not_shared() -> None:
    timeline = simulate(two_sends(), toy(latency_us=1e5))
    assert send_times(timeline) == {"send x>2": (0, 2.1), "send y>3": (0, 2.1)}


def test_a_nic_is_full_duplex() -> None:
    rows = (Send("x", 1, 10**9), Recv("y", 1)), (Send("y", 0, 10**9), Recv("x", 0))
    program = Program(((0,), (2,)), rows)
    assert not shared_nics_of(program, enumerate(row[0] for row in rows), ClusterCosts(toy()))
    assert simulate(program, toy()).makespan == pytest.approx(1)


def test_messages_from_two_hosts_share_the_nic_of_their_receiver() -> None:
    rows = (Send("x", 2, 10**9),), (Send("y", 2, 10**9),), (Recv("x", 0), Recv("y", 1))
    program = Program(((0,), (2,), (4,)), rows)
    assert simulate(program, toy(3)).makespan == pytest.approx(2)
    assert Clock.of(program).makespan(ClusterCosts(toy(3))) == pytest.approx(2)


def test_messages_of_a_mesh_are_serial_and_share_nics_with_other_meshes() -> None:
    # Mesh 0 sends x, then z. x and y share the NIC until 2 s; z has it alone.
    first, *others = two_sends().instructions
    rows = (*first, Send("z", 2, 10**9)), others[0], (*others[1], Recv("z", 0)), others[2]
    timeline = simulate(replace(two_sends(), instructions=rows), toy())
    assert send_times(timeline) == {"send x>2": (0, 2), "send y>3": (0, 2), "send z>2": (2, 3)}


def test_a_collective_between_hosts_follows_earlier_messages_of_its_mesh() -> None:
    # Alone, y (from two devices into one NIC) takes 2 s and x 1 s. Together, x arrives at 2 s and y
    # at 3 s. Then two devices exchange 1 GB each.
    far: OpList = (wait(0.5), Start(Collective("far", "all_gather", 2e9, ((0, 1),))), Done("far"))
    rows: tuple[tuple[Instruction, ...], ...] = (
        (Send("y", 1, 2 * 10**9), Run(0, "F")),
        (Recv("y", 0),),
        (Send("x", 3, 10**9),),
        (Recv("x", 2),),
    )
    timeline = simulate(Program(((0, 2), (4,), (1,), (5,)), rows, {"0F": far}), toy(3))
    times = {
        span.name: (span.start, span.end)
        for span in timeline.spans
        if span.stream == "communication"
    }
    assert times == {"send x>3": (0, 2), "send y>1": (0, 3), "far": (3, 4)}
    assert [(span.start, span.end) for span in timeline.spans if span.name == "dot"] == [(0, 0.5)]


def test_messages_between_pools_use_a_share_of_the_faster_nic() -> None:
    fast = toy(1).model_copy(update={"inter_host": Link(bandwidth_gb_per_s=2, latency_us=0)})
    cluster = HeterogeneousCluster(name="both", description="", pools=(toy(2), fast))
    costs = costs_of(cluster)
    assert costs.nics(((0, 4),)) == {(0, "out", 0): 1, (1, "in", 0): 0.5}
    # Two slow NICs send into one that is twice as fast, so there is no contention.
    rows = (Send("x", 2, 10**9),), (Send("y", 2, 10**9),), (Recv("x", 0), Recv("y", 1))
    assert simulate(Program(((0,), (2,), (4,)), rows), cluster).makespan == pytest.approx(1)


def test_shared_nics_are_those_of_several_meshes_without_duplicates() -> None:
    ways = {
        (0, 1): {"a": 1.0, "b": 1.0, "own": 0.5},
        (2, 1): {"a": 0.5, "b": 0.5, "c": 1.0},
        (3, 1): {"c": 1.0},
        (3, 2): {"d": 1.0},
    }
    assert shared_nics(ways) == {
        (0, 1): {"b": 1.0},
        (2, 1): {"b": 0.5, "c": 1.0},
        (3, 1): {"c": 1.0},
        (3, 2): {},
    }
    # a mesh sends its messages one after another
    assert shared_nics({(0, 1): {"a": 1.0}, (0, 2): {"a": 1.0}}) == {}


def test_the_error_of_a_deadlock_shows_where_meshes_wait() -> None:
    rows = (Send("x", 2, 8), Recv("q", 2)), (Send("y", 2, 8),), (Recv("x", 0), Recv("nothing", 1))
    with pytest.raises(DeadlockError, match=r"mesh 2: recv x<0 \| > recv nothing<1"):
        simulate(Program(((0,), (2,), (4,)), rows), toy(3))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6))
def test_a_nic_is_not_idle_while_messages_wait(messages: list[tuple[int, int]]) -> None:
    """The last message ends when it would in a serial order."""
    nics = NicSharing()
    for mesh, (ready, seconds) in enumerate(messages):
        nics.send(Message("", ("x", mesh, 9), ready, 0.0, seconds, {"nic": 1.0}))
    ends = {}
    while message := nics.arrival():
        ends[message.mesh] = nics.time
    last = 0
    for ready, seconds in sorted(messages):
        last = max(last, ready) + seconds
    assert max(ends.values()) == pytest.approx(last)
    assert all(ends[mesh] >= sum(message) - 1e-9 for mesh, message in enumerate(messages))


class Shared(BandwidthOnly):
    """`COSTS` with one NIC that all devices share, or with one NIC per device."""

    together: bool

    def __init__(self, together: bool) -> None:
        super().__init__(bandwidth=1.0, flop_per_s=1.0)
        object.__setattr__(self, "together", together)

    def link(self, groups: Groups) -> LinkClass:
        return "between hosts"

    def nics(self, pairs: Groups) -> Mapping[Hashable, float]:
        return {"nic": 1.0} if self.together else {source: 1.0 for source, _ in pairs}


@given(programs(), st.sampled_from([0.0, 0.5]))
def test_sharing_takes_between_parallel_and_serial_time(program: Program, dispatch: float) -> None:
    cluster = Cluster.load("cpu-virtual")
    timelines = [
        simulate(program, cluster, Shared(together), dispatch) for together in (False, True)
    ]
    alone, shared = (timeline.makespan for timeline in timelines)
    assert alone <= shared * (1 + 1e-9)
    busy = [
        timelines[0].busy(mesh, stream)
        for mesh in range(len(program.meshes))
        for stream in get_args(Stream)
    ]
    assert shared <= sum(busy) * (1 + 1e-9)
    costs: CostModel = Shared(True)
    assert Clock.of(program).makespan(costs, dispatch) == pytest.approx(shared)
    for timeline in timelines:
        for mesh in range(len(program.meshes)):
            own = [span for span in timeline.spans if (span.mesh, span.category) == (mesh, "send")]
            assert all(first.end <= second.start + 1e-9 for first, second in pairwise(own))
