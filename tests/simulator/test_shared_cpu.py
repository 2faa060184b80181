"""Hosts that are processes of one machine share its cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.shared_cpu import simulate_processes
from simulator.hardware.cluster import Cluster, Processes
from simulator.program import DeadlockError, Free, Program, Recv, Run, Send
from simulator.spans import Span
from tests.simulator.bodies import programs
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(bandwidth=1.0, flop_per_s=1.0)  # a byte takes a second
ONE_EACH = Cluster.load("cpu-hosts").with_size(4, 1)
TWO_TASKS = Program(((0,), (1,)), ((Run(0, "F"),), (Run(1, "F"),)))
CHAIN = Program(
    ((0,), (1,)),
    ((Run(0, "F"), Send("x", 1, 3), Free(("x",)), Run(0, "B")), (Recv("x", 0), Run(1, "F"))),
)


def with_processes(cluster: Cluster = ONE_EACH, **fields: float) -> Cluster:
    return cluster.model_copy(update={"processes": Processes(**fields)})


def makespan(program: Program, seconds: dict[str, float], cluster: Cluster) -> float:
    return simulate_processes(program, cluster, seconds, COSTS).makespan


@pytest.mark.parametrize(
    ("concurrent_instructions", "expected"), [(1, 5), (1.25, 4.2), (1.5, 11 / 3), (2, 3), (9, 3)]
)
def test_tasks_of_two_hosts_share_the_cores(concurrent_instructions, expected):
    # Tasks of 2 s and 3 s each run at half of `concurrent_instructions` until the first ends at
    # 4 / concurrent_instructions; the second then needs 1 s alone.
    assert makespan(
        TWO_TASKS,
        {"0F": 2, "1F": 3},
        with_processes(concurrent_instructions=concurrent_instructions),
    ) == pytest.approx(expected)


def test_tasks_of_one_host_are_serial():
    assert (
        makespan(
            TWO_TASKS,
            {"0F": 2, "1F": 3},
            with_processes(Cluster.load("cpu-hosts").with_size(2, 2), concurrent_instructions=2),
        )
        == 5
    )


def test_a_transfer_overlaps_with_the_next_task_of_its_sender():
    # 0F ends at 2 s. 0B (4 s) runs beside the transfer (3 s) and 1F (1 s): both end at 6 s.
    timeline = simulate_processes(
        CHAIN, with_processes(concurrent_instructions=2), {"0F": 2, "0B": 4, "1F": 1}, COSTS
    )
    assert timeline.makespan == 6
    assert [span for span in timeline.spans if span.mesh == 1] == [
        Span("recv x<0", 1, "compute", 0, 2, "bubble"),
        Span("recv x<0", 1, "communication", 2, 5, "send", link="between hosts"),
        Span("1F0", 1, "compute", 5, 6, "task", "1F0"),
    ]
    assert [(arrow.sent, arrow.received) for arrow in timeline.arrows] == [(2, 5)]
    assert (
        makespan(CHAIN, {"0F": 2, "0B": 4, "1F": 1}, with_processes(concurrent_instructions=1))
        == 10
    )


def test_steps_and_tasks_have_a_fixed_cost():
    # 1 s for the step, then the tasks of 2 + 0.5 s and 3 + 0.5 s one after the other.
    seconds = {"0F": 2, "1F": 3}
    assert makespan(
        TWO_TASKS, seconds, with_processes(step_us=1e6, task_us=5e5, concurrent_instructions=1)
    ) == pytest.approx(7)


def test_hosts_of_one_mesh_divide_its_work_equally():
    wide = Program(((0, 1), (2, 3)), CHAIN.instructions)
    timeline = simulate_processes(
        wide, with_processes(concurrent_instructions=4), {"0F": 4, "0B": 4, "1F": 2}, COSTS
    )
    # 0F ends at 2 s on both hosts. Two pairs send 1.5 bytes each, which the two receivers share. 1F
    # takes 1 s.
    assert timeline.makespan == pytest.approx(max(4, 2 + 0.75 + 1))


@given(programs(), st.floats(1, 4), st.sampled_from((2, 4)))
def test_the_makespan_is_between_that_of_all_cores_and_of_one(
    program, concurrent_instructions, per_host
):
    names = {
        instruction.task
        for row in program.instructions
        for instruction in row
        if isinstance(instruction, Run)
    }
    seconds = {name: 1.0 + number for number, name in enumerate(sorted(names))}
    size = max(device for mesh in program.meshes for device in mesh) + 1
    hosts = Cluster.load("cpu-hosts").with_size(-(-size // per_host), per_host)
    timeline = simulate_processes(
        program,
        with_processes(hosts, concurrent_instructions=concurrent_instructions),
        seconds,
        COSTS,
    )
    one_core = simulate_processes(
        program, with_processes(hosts, concurrent_instructions=1), seconds, COSTS
    )
    work = one_core.makespan  # tasks run one after the other, without a gap
    assert work / concurrent_instructions - 1e-6 <= timeline.makespan <= work + 1e-6
    tasks = sum(
        seconds[instruction.task]
        for row in program.instructions
        for instruction in row
        if isinstance(instruction, Run)
    )
    assert work >= tasks - 1e-6


def test_missing_processes_or_seconds_are_refused():
    with pytest.raises(
        ValueError, match="section processes with step_us, task_us, concurrent_instructions"
    ):
        simulate_processes(TWO_TASKS, ONE_EACH.model_copy(update={"processes": None}), {})
    with pytest.raises(ValueError, match="task 1F has no seconds; they are given of: 0F"):
        simulate_processes(TWO_TASKS, with_processes(), {"0F": 1})
    waiting = Program(((0,), (1,)), ((Recv("x", 1),), (Recv("y", 0),)))
    with pytest.raises(DeadlockError):
        simulate_processes(waiting, with_processes(), {})
