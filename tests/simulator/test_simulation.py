"""The discrete-event engine: streams, sends, dispatch and bubbles, by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.simulation import simulate
from simulator.engine.timeline import Timeline
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse
from simulator.program import DeadlockError, Instruction, Program, Recv, Run, Send
from simulator.spans import Span, Stream
from simulator.work import Collective, Done, Loop, Op, OpList, Start
from tests.simulator.bodies import (
    COSTS,
    bodies,
    compute,
    exposed_communication,
    one_task,
    programs,
    seconds,
    start,
    unrolled,
)
from tests.toy_costs import BandwidthOnly

CLUSTER = Cluster.load("cpu-virtual")


def step(*body: Op) -> Timeline:
    """Return the timeline of one task on devices 0 and 1."""
    return simulate(one_task(*body), CLUSTER, COSTS)


def test_kernels_are_serial_on_the_compute_stream() -> None:
    timeline = step(compute(2, "a"), compute(3, "b"))
    assert timeline.spans == (
        Span("a", 0, "compute", 0, 2, "gemm", "0S0"),
        Span("b", 0, "compute", 2, 5, "gemm", "0S0"),
    )
    assert timeline.makespan == 5


def test_communication_overlaps_with_compute_until_its_done() -> None:
    timeline = step(compute(1), start(5), compute(2), Done("gather"), compute(1))
    # The gather runs at 1-6; computation ends at 3, waits for 3 seconds and ends at 7.
    assert timeline.makespan == 7
    assert timeline.busy(0, "compute") == 4
    assert timeline.busy(0, "communication") == 5
    assert exposed_communication(timeline, 0) == 3
    assert timeline.seconds_by_category(0) == {"gemm": 4, "all_gather": 5, "wait": 3}


def test_communication_that_ends_before_its_done_is_not_exposed() -> None:
    timeline = step(start(2), compute(5), Done("gather"))
    assert (timeline.makespan, exposed_communication(timeline, 0)) == (5, 0)


def test_a_collective_with_an_immediate_done_is_exposed() -> None:
    assert exposed_communication(step(compute(1), start(4), Done("gather")), 0) == 4


def test_collectives_queue_on_the_communication_stream() -> None:
    timeline = step(start(3, "a"), start(4, "b"), Done("a"), compute(1), Done("b"))
    assert [(s.name, s.start, s.end) for s in timeline.spans if s.stream == "communication"] == [
        ("a", 0, 3),
        ("b", 3, 7),
    ]
    assert timeline.makespan == 7


def test_a_collective_without_done_counts_in_the_makespan() -> None:
    timeline = step(compute(1), start(4))
    assert (timeline.makespan, exposed_communication(timeline, 0)) == (5, 4)


def test_a_done_without_its_start_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"task 0S0: waits for collective 'gather', which is not running"
    ):
        step(Done("gather"))


def test_a_loop_of_a_million_iterations_takes_their_seconds() -> None:
    timeline = step(compute(1), Loop(10**6, (start(3), compute(2), Done("gather"))), compute(1))
    assert timeline.makespan == pytest.approx(2 + 3e6)
    assert timeline.busy(0, "compute") == pytest.approx(2 + 2e6)
    assert timeline.busy(0, "communication") == pytest.approx(3e6)
    assert exposed_communication(timeline, 0) == pytest.approx(1e6)
    assert len(timeline.spans) < 20


def test_nested_loops_multiply() -> None:
    timeline = step(Loop(1000, (compute(1), Loop(1000, (compute(2),)))))
    assert timeline.makespan == pytest.approx(1000 * (1 + 2000))
    assert timeline.busy(0, "compute") == pytest.approx(timeline.makespan)


def test_an_empty_loop_does_nothing() -> None:
    assert step(Loop(0, (compute(1),)), Loop(5, ())).makespan == 0


TWO_STAGES = Program(
    meshes=((0, 1), (2, 3)),
    instructions=(
        (Run(0, "F", 0), Send("x0", 1, 2), Run(0, "F", 1), Send("x1", 1, 2)),
        (Recv("x0", 0), Run(1, "F", 0), Recv("x1", 0), Run(1, "F", 1)),
    ),
    bodies={"0F": (compute(2),), "1F": (compute(5),)},
    memory=(MemoryUse(arguments=3), MemoryUse(arguments=4)),
)


def test_stages_overlap_and_wait_for_their_inputs() -> None:
    timeline = simulate(TWO_STAGES, CLUSTER, COSTS)
    # Each of two devices sends one of the two bytes. Mesh 0 computes at 0-2 and 2-4 and sends at
    # 2-3 and 4-5. Mesh 1 computes at 3-8 and 8-13; its second input arrives at 5.
    assert timeline.makespan == 13
    assert timeline.seconds_by_category(0) == {"gemm": 4, "send": 2}
    assert timeline.seconds_by_category(1) == {"gemm": 10, "bubble": 3}
    assert exposed_communication(timeline, 1) == 0
    assert timeline.memory == TWO_STAGES.memory


def test_a_value_that_arrives_in_parts_is_gathered_before_its_task() -> None:
    first, second = TWO_STAGES.instructions
    gather = Collective("gather x0", "all_gather", 4, ((0, 1),))
    rows = first, (Recv("x0", 0, gather), *second[1:])
    timeline = simulate(replace(TWO_STAGES, instructions=rows), CLUSTER, COSTS)
    # In an all_gather of 4 bytes each of two devices sends 2. Mesh 1 waits at 0-3, gathers at 3-5
    # and computes at 5-10 and 10-15.
    assert timeline.makespan == 15
    assert timeline.seconds_by_category(1) == {"gemm": 10, "bubble": 3, "all_gather": 2, "wait": 2}


def test_devices_wait_only_for_a_late_host() -> None:
    timeline = simulate(TWO_STAGES, CLUSTER, COSTS, dispatch=3.0)
    # Hosts dispatch an instruction at 3, 6, 9 and 12. Mesh 0 computes at 3-5 and 9-11 and sends at
    # 6-7 and 12-13. Mesh 1 receives at 7 and 13 and computes at 7-12 and 13-18.
    assert timeline.makespan == 18
    assert timeline.seconds_by_category(0) == {"dispatch": 12, "host": 8, "gemm": 4, "send": 2}
    assert timeline.seconds_by_category(1) == {"dispatch": 12, "host": 3, "gemm": 10, "bubble": 5}
    assert timeline.busy(1, "compute") == 10


def test_the_default_dispatch_is_the_launch_of_the_cluster() -> None:
    calibrated = CLUSTER.model_copy(update={"host_launch_us": 3e6})
    assert simulate(TWO_STAGES, calibrated, COSTS) == simulate(
        TWO_STAGES, CLUSTER, COSTS, dispatch=3.0
    )
    assert simulate(TWO_STAGES, calibrated, COSTS, dispatch=0.0) == simulate(
        TWO_STAGES, CLUSTER, COSTS
    )


def test_the_link_of_a_collective_follows_from_its_devices() -> None:
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=2)
    body = (
        Start(Collective("near", "all_gather", 1, ((0, 1),))),
        Start(Collective("far", "all_gather", 1, ((0, 2),))),
    )
    timeline = simulate(Program(((6, 7, 8),), ((Run(0, "S"),),), {"0S": body}), cluster)
    assert {span.name: span.link for span in timeline.spans} == {
        "near": "within hosts",
        "far": "between hosts",
    }


def test_groups_are_positions_in_their_mesh() -> None:
    groups_seen = []

    class Spy(BandwidthOnly):
        def collective(self, kind, num_bytes, groups):
            groups_seen.append(groups)
            return 0.0

    body: OpList = (Start(Collective("sum", "all_reduce", 1, ((0, 1), (2, 3)))), Done("sum"))
    simulate(Program(((4, 6, 5, 7),), ((Run(0, "S"),),), {"0S": body}), CLUSTER, Spy())
    assert groups_seen == [((4, 6), (5, 7))]


def test_a_group_outside_its_mesh_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"gather has groups \(\(0, 1\),\); its mesh has positions 0 to 0"
    ):
        simulate(Program(((3,),), ((Run(0, "S"),),), {"0S": (start(1),)}), CLUSTER, COSTS)


def test_a_mesh_outside_the_cluster_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"mesh 1 has devices \(8,\); cluster 'cpu-virtual' has devices 0 to 7"
    ):
        simulate(Program(((0,), (8,)), ((), ())), CLUSTER)


def test_a_task_without_a_body_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"task 0F has no body.*has bodies of: 1F"):
        simulate(Program(((0,),), ((Run(0, "F"),),), {"1F": ()}), CLUSTER)


def test_the_error_of_a_deadlock_shows_where_meshes_wait() -> None:
    rows: tuple[tuple[Instruction, ...], ...] = (
        (Recv("y", 1), Send("x", 1)),
        (Recv("x", 0), Send("y", 0)),
    )
    with pytest.raises(DeadlockError, match=r"mesh 0: > recv y<1 \| send x>1"):
        simulate(Program(((0,), (1,)), rows), CLUSTER)


@given(bodies)
def test_a_loop_equals_its_unrolled_iterations(body: OpList) -> None:
    short, long = step(*body), step(*unrolled(body))
    assert short.makespan == pytest.approx(long.makespan)
    assert short.seconds_by_category(0) == pytest.approx(long.seconds_by_category(0))


@given(bodies)
def test_a_step_takes_between_its_longest_stream_and_their_sum(body: OpList) -> None:
    timeline = step(*body)
    busy = timeline.busy(0, "compute"), timeline.busy(0, "communication")
    assert max(busy) <= timeline.makespan + 1e-9
    assert timeline.makespan <= sum(busy) + 1e-9
    assert timeline.makespan == pytest.approx(busy[0] + exposed_communication(timeline, 0))


@given(bodies)
def test_spans_of_a_stream_do_not_overlap(body: OpList) -> None:
    timeline = step(*unrolled(body))
    for stream in ("compute", "communication"):
        own = [span for span in timeline.spans if span.stream == stream]
        assert all(first.end <= second.start for first, second in pairwise(own))


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5), st.integers(1, 6))
def test_the_makespan_of_a_pipeline_equals_its_formula(
    stages: list[tuple[int, int]], micro_batches: int
) -> None:
    """Stage i computes for `stages[i][0]` seconds per microbatch and sends for `stages[i][1]`."""
    count = len(stages)
    rows = []
    for i, (_, sent) in enumerate(stages):
        row: list[Instruction] = []
        for micro_batch in range(micro_batches):
            row += [Recv(f"x{micro_batch}", i - 1)] if i else []
            row += [Run(i, "F", micro_batch)]
            row += [Send(f"x{micro_batch}", i + 1, sent)] if i + 1 < count else []
        rows.append(tuple(row))
    bodies = {f"{i}F": (compute(time),) for i, (time, _) in enumerate(stages)}
    timeline = simulate(
        Program(tuple((i,) for i in range(count)), tuple(rows), bodies), CLUSTER, COSTS
    )
    times, sends = [time for time, _ in stages], [sent for _, sent in stages[:-1]]
    # One microbatch passes every stage and link; the others queue behind it at the slowest of them.
    # This is exact for FIFO stages.
    assert timeline.makespan == pytest.approx(
        sum(times) + sum(sends) + (micro_batches - 1) * max(times + sends)
    )


@given(programs(), st.sampled_from([0.0, 1.0]))
def test_a_program_takes_between_its_longest_stream_and_the_sum_of_all(
    program: Program, dispatch: float
) -> None:
    timeline = simulate(program, CLUSTER, COSTS, dispatch)
    busy = [
        timeline.busy(mesh, stream)
        for mesh in range(len(program.meshes))
        for stream in get_args(Stream)
    ]
    assert max(busy) <= timeline.makespan * (1 + 1e-9)
    assert timeline.makespan <= sum(busy) * (1 + 1e-9)


@given(programs(), st.floats(1, 10), st.floats(1, 10), st.floats(0, 1))
def test_faster_hardware_is_never_slower(
    program: Program, compute: float, network: float, host: float
) -> None:
    slow = simulate(program, CLUSTER, COSTS, dispatch=1.0).makespan
    fast = simulate(
        program, CLUSTER, BandwidthOnly(bandwidth=network, flop_per_s=compute), dispatch=host
    ).makespan
    assert fast <= slow * (1 + 1e-9)
