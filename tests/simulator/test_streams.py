"""Contention between computation and collectives on the streams of a device."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.cost_model import ClusterCosts, HeterogeneousCosts
from simulator.engine.clock import Clock
from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import HeterogeneousCluster
from simulator.program import Program, Recv, Run, Send
from simulator.work import Collective, Done, Groups, Loop, OpList, Start
from tests.simulator.bodies import (
    COSTS,
    Slowed,
    TwoLinks,
    bodies,
    compute,
    exposed_communication,
    far,
    flat,
    one_task,
    programs,
    start,
)

CLUSTER = Cluster.load("cpu-virtual")


def simulate_slowed(*ops, factor: float = 1.5) -> Timeline:
    return simulate(one_task(*ops), CLUSTER, Slowed(factor))


def times_by_name(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {
        span.name if span.category != "wait" else "wait": (span.start, span.end)
        for span in timeline.spans
    }


def test_overlapping_compute_and_communication_slow_each_other() -> None:
    # 2 of the gather's 4 seconds run beside the product, both 1.5 times slower, the rest alone.
    longer = simulate_slowed(start(4), compute(2), Done("gather"))
    assert times_by_name(longer) == {"dot": (0, 3), "gather": (0, 5), "wait": (3, 5)}
    shorter = simulate_slowed(start(2), compute(4), Done("gather"))
    assert times_by_name(shorter) == {"dot": (0, 5), "gather": (0, 3)}


def test_serial_compute_and_communication_do_not_slow_each_other() -> None:
    assert times_by_name(
        simulate_slowed(compute(2), start(4), Done("gather"), compute(1, "after"))
    ) == {
        "dot": (0, 2),
        "gather": (2, 6),
        "wait": (2, 6),
        "after": (6, 7),
    }


def test_queued_collectives_slow_the_kernels_that_overlap_with_them() -> None:
    body = (start(2, "a"), start(2, "b"), compute(3), Done("a"), Done("b"))
    # a and 2 s of the product take 3 s, b and the last of the product 1.5 s, the rest of b 1 s.
    assert times_by_name(simulate_slowed(*body)) == {
        "a": (0, 3),
        "dot": (0, 4.5),
        "b": (3, 5.5),
        "wait": (4.5, 5.5),
    }


def test_a_pending_collective_slows_the_next_task_until_a_send() -> None:
    tasks = {"0F": (start(4), compute(2)), "1F": (compute(1),), "2F": (Done("gather"),)}
    row = (Run(0, "F"), Run(1, "F"), Run(2, "F"))
    # The gather has 1 of its 4 s left after 3 s beside 4.5 s of computation.
    assert simulate(Program(((0, 1),), (row,), tasks), CLUSTER, Slowed(1.5)).makespan == 5.5
    # The send after the first task lets the gather end its last 2 s at full speed.
    rows = ((Run(0, "F"), Send("x", 1, 2), Run(1, "F"), Run(2, "F")), (Recv("x", 0),))
    timeline = simulate(Program(((0, 1), (2, 3)), rows, tasks), CLUSTER, Slowed(1.5))
    assert times_by_name(timeline)["gather"] == (0, 5)
    assert timeline.makespan == 6  # the send of one second queues behind the gather


@given(programs(), st.floats(1, 2), st.sampled_from([0.0, 0.5]))
def test_the_clock_agrees_with_the_engine(program: Program, factor: float, dispatch: float) -> None:
    costs = Slowed(factor)
    expected = simulate(program, CLUSTER, costs, dispatch).makespan
    assert Clock.of(program).makespan(costs, dispatch) == pytest.approx(expected)


@given(bodies, st.floats(1, 2))
def test_contention_takes_between_free_and_serial_time(body: OpList, factor: float) -> None:
    free, slowed = simulate(one_task(*body), CLUSTER, COSTS), simulate_slowed(*body, factor=factor)
    serial = sum(free.busy(0, stream) for stream in ("compute", "communication"))
    assert free.makespan <= slowed.makespan * (1 + 1e-9)
    assert slowed.makespan <= min(factor * free.makespan, serial) * (1 + 1e-9)


@given(programs(), st.floats(1, 2))
def test_contention_slows_pipelines_by_at_most_its_factor(program: Program, factor: float) -> None:
    free, slowed = (simulate(program, CLUSTER, costs).makespan for costs in (COSTS, Slowed(factor)))
    assert free <= slowed * (1 + 1e-9)
    assert slowed <= factor * free * (1 + 1e-9)


@given(flat, st.integers(1, 12), st.floats(1, 2))
def test_a_loop_under_contention_equals_its_unrolled_iterations(
    body: OpList, count: int, factor: float
) -> None:
    looped = simulate(one_task(Loop(count, body)), CLUSTER, Slowed(factor))
    unrolled = simulate(one_task(*body * count), CLUSTER, Slowed(factor))
    assert looped.makespan == pytest.approx(unrolled.makespan)
    assert looped.busy(0, "communication") == pytest.approx(unrolled.busy(0, "communication"))


def test_a_collective_from_before_a_loop_slows_its_iterations() -> None:
    body = (start(40), Loop(30, (compute(1),)), Done("gather"))
    assert simulate_slowed(*body).makespan == pytest.approx(30 * 1.5 + 10)


def simulate_two_links(*ops, factor: float = 1.0) -> Timeline:
    return simulate(one_task(*ops), CLUSTER, TwoLinks(factor))


def test_collectives_overlap_on_different_links_and_queue_on_one_link() -> None:
    body = (
        start(4),
        far(3),
        compute(1),
        start(2, "next"),
        Done("gather"),
        Done("far"),
        Done("next"),
    )
    timeline = simulate_two_links(*body)
    assert times_by_name(timeline) == {
        "dot": (0, 1),
        "gather": (0, 4),
        "far": (0, 3),
        "next": (4, 6),
        "wait": (4, 6),
    }
    assert exposed_communication(timeline, 0) == 5


def test_compute_has_the_largest_contention_factor_and_each_collective_its_own() -> None:
    class Uneven(TwoLinks):
        def contention_factor(self, groups: Groups) -> float:
            return 2.0 if self.link(groups) == "between hosts" else 1.25

    # Until 4 s, the far gather does its 2 s, the near one 3.2 s and the product 2 s. Until 5 s, the
    # near one does its last 0.8 s and the product 0.8 s; 0.2 s of it are left.
    body = (far(2), start(4), compute(3), Done("far"), Done("gather"))
    timeline = simulate(one_task(*body), CLUSTER, Uneven(1.0))
    assert times_by_name(timeline) == {
        "dot": (0, pytest.approx(5.2)),
        "far": (0, 4),
        "gather": (0, pytest.approx(5)),
    }


def test_a_send_does_not_wait_for_a_collective_on_another_link() -> None:
    cluster = Cluster.load("dgx_a100_80").with_size(2)
    near = Collective("near", "all_reduce", 1e9, (tuple(range(8)),))
    rows = (Run(0, "F"), Send("x", 1, 8 * 10**8)), (Recv("x", 0),)
    program = Program((tuple(range(8)), tuple(range(8, 16))), rows, {"0F": (Start(near),)})
    timeline = simulate(program, cluster)
    assert {span.link: span.start for span in timeline.spans if span.mesh == 0} == {
        "within hosts": 0,
        "between hosts": 0,
    }
    assert Clock.of(program).makespan(ClusterCosts(cluster)) == pytest.approx(timeline.makespan)


@given(programs(), st.floats(1, 2), st.sampled_from([0.0, 0.5]))
def test_the_clock_agrees_with_the_engine_on_two_links(
    program: Program, factor: float, dispatch: float
) -> None:
    costs = TwoLinks(factor)
    timeline = simulate(program, CLUSTER, costs, dispatch)
    assert Clock.of(program).makespan(costs, dispatch) == pytest.approx(timeline.makespan)
    busy: Counter[tuple[int, str, str | None]] = Counter()
    for span in timeline.spans:
        if span.category not in ("wait", "bubble", "host"):
            busy[span.mesh, span.stream, span.link] += span.seconds  # pyright: ignore[reportArgumentType]
    longest = max(busy.values(), default=0)
    assert longest <= timeline.makespan * (1 + 1e-9) <= (sum(busy.values()) + 1e-9) * (1 + 1e-9)


@given(bodies, st.floats(1, 2))
def test_a_second_link_is_never_slower_than_one(body: OpList, factor: float) -> None:
    two, one = simulate_two_links(*body, factor=factor), simulate_slowed(*body, factor=factor)
    assert two.makespan <= one.makespan * (1 + 1e-9)


@given(flat, st.integers(1, 12), st.floats(1, 2))
def test_a_loop_over_two_links_equals_its_unrolled_iterations(
    body: OpList, count: int, factor: float
) -> None:
    looped, unrolled = (
        simulate_two_links(Loop(count, body), factor=factor),
        simulate_two_links(*body * count, factor=factor),
    )
    assert looped.makespan == pytest.approx(unrolled.makespan)
    assert looped.busy(0, "communication") == pytest.approx(unrolled.busy(0, "communication"))


def test_the_contention_factor_is_that_of_the_link() -> None:
    a100, v100 = Cluster.load("dgx_a100_80").with_size(2), Cluster.load("p3.16xlarge").with_size(2)
    inter = a100.inter_host
    assert inter is not None
    costs = ClusterCosts(
        a100.model_copy(update={"inter_host": inter.model_copy(update={"contention_factor": 1.2})})
    )
    assert costs.contention_factor(((0, 1), (8, 9))) == a100.intra_host.contention_factor > 1.2
    assert costs.contention_factor(((0, 1, 8, 9),)) == 1.2
    simulate_two_links = HeterogeneousCosts(
        HeterogeneousCluster(name="simulate_two_links", description="", pools=(v100, a100))
    )
    assert (
        simulate_two_links.contention_factor(((0, 1),))
        == 1
        < simulate_two_links.contention_factor(((16, 17),))
        == a100.intra_host.contention_factor
    )
