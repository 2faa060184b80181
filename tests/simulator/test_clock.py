"""The clock of pipelines returns the makespan of the discrete-event engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine import clock
from simulator.engine.clock import Clock
from simulator.engine.max_plus import MaxPlusMap
from simulator.engine.simulation import simulate
from simulator.hardware.cluster import Cluster
from simulator.program import DeadlockError, Instruction, Program, Recv, Run, Send
from tests.simulator.bodies import COSTS, programs

CLUSTER = Cluster.load("cpu-virtual")


@given(programs(), st.sampled_from([0.0, 0.5, 7.0]))
def test_the_clock_has_the_makespan_of_the_engine(program: Program, dispatch: float) -> None:
    expected = simulate(program, CLUSTER, COSTS, dispatch).makespan
    assert Clock.of(program).makespan(COSTS, dispatch) == pytest.approx(expected)


def pipeline(stages: int, micro_batches: int) -> Program:
    rows: list[tuple[Instruction, ...]] = []
    for i in range(stages):
        row: list[Instruction] = []
        for b in range(micro_batches):
            row += [Recv(f"x{i - 1}.{b}", i - 1)] if i else []
            row += (
                [Run(i, "F", b), Send(f"x{i}.{b}", i + 1, 1)]
                if i + 1 < stages
                else [Run(i, "F", b)]
            )
        rows.append(tuple(row))
    return Program(tuple((i,) for i in range(stages)), tuple(rows))


def test_numba_and_python_return_identical_makespans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    makespans = set()
    for threshold in (0, 10**9):
        monkeypatch.setattr(clock, "_WORTH_COMPILING", threshold)
        makespans.add(
            Clock.of(pipeline(5, 7)).makespan_with(
                lambda mesh, _: MaxPlusMap.task(0.1 * mesh), 0.01
            )
        )
    assert len(makespans) == 1


def test_instructions_of_all_microbatches_have_one_kind() -> None:
    assert len(Clock.of(pipeline(3, 100)).kinds) == 3 + 2 + 2  # tasks, sends and receives


def test_a_value_sent_twice_is_received_in_turn() -> None:
    rows = ((Send("x", 1, 2), Send("x", 1, 4)), (Recv("x", 0), Recv("x", 0)))
    assert Clock.of(Program(((0,), (1,)), rows)).makespan(COSTS) == 6


@pytest.mark.parametrize("first", [Recv("y", 1), Recv("nothing", 1)], ids=str)
def test_a_deadlock_is_shown(first: Recv) -> None:
    stuck = Program(((0,), (1,)), ((first, Send("x", 1)), (Recv("x", 0), Send("y", 0))))
    with pytest.raises(DeadlockError, match=rf"mesh 0: > {first} \| send x>1"):
        Clock.of(stuck).makespan(COSTS)


def test_a_program_without_instructions_takes_no_time() -> None:
    assert Clock.of(Program((), ())).makespan(COSTS) == 0
    assert Clock.of(Program(((0,),), ((),))).makespan(COSTS) == 0
