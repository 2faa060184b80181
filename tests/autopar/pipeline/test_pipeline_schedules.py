"""Pipeline schedules equal golden grids, and their makespans follow from formulas."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import assert_never

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.pipeline import pipeline_schedules
from autopar.pipeline.pipeline_schedules import (
    Schedule,
    has_backward,
    make_schedule,
    schedule_kind,
    schedule_names,
    splits_backward,
)
from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError, ScheduleKind
from simulator.program import DeadlockError, Free, Phase, Recv, Run, Send, walk
from tests.autopar.pipeline.stack_steps import (
    assert_as_serial,
    pipeline,
    stack_batch,
    stack_params,
    stack_step,
)

INSTANCES = json.loads((Path(__file__).parents[2] / "golden" / "schedules.json").read_text())[
    "instances"
]
EQUAL_THIRDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}


def clock(
    schedule: Schedule,
    seconds: Mapping[Phase, float] | Callable[[Run], float],
    transfer: Callable[[int, int], float] = lambda source, destination: 0.0,
) -> dict[Run, tuple[float, float]]:
    """Return the start and end of each task in seconds, by simulating one instruction at a time.

    Args:
        schedule: the schedule whose `makespan` is the last end.
        seconds: seconds of a task, by phase or by task.
        transfer: seconds to send a task's result from one mesh to another. Transfers overlap with
            compute, and a mesh sends one result after another.

    Raises:
        DeadlockError: the meshes wait for one another.
    """
    time = seconds if callable(seconds) else lambda task: seconds[task.phase]
    clocks = [0.0] * schedule.pipeline.num_meshes
    sending = [0.0] * schedule.pipeline.num_meshes
    arrived: dict[tuple[str, int], float] = {}
    spans: dict[Run, tuple[float, float]] = {}
    for mesh, instruction in walk(schedule.program()):
        match instruction:
            case Recv(value):
                clocks[mesh] = max(clocks[mesh], arrived[value, mesh])
            case Run():
                start, clocks[mesh] = clocks[mesh], clocks[mesh] + time(instruction)
                spans[instruction] = start, clocks[mesh]
            case Send(value, to):
                sending[mesh] = arrived[value, to] = max(clocks[mesh], sending[mesh]) + transfer(
                    mesh, to
                )
            case Free():
                pass
            case _:
                assert_never(instruction)
    return spans


def most_in_flight(schedule: Schedule) -> list[int]:
    """Return how many (stage, microbatch) have activations on each mesh at most."""
    release = "W" if "W" in schedule.phases else "B" if "B" in schedule.phases else "F"
    most = []
    for row in schedule.rows:
        counts = [0]
        for task in row:
            if task.phase == "F":
                counts.append(counts[-1] + 1)
            if task.phase == release:
                counts.append(counts[-1] - 1)
        most.append(max(counts))
    return most


def grid(schedule: Schedule, clocks: int) -> list[str]:
    """Return the task of each mesh at each clock, in the format of the golden file."""
    rows = [["."] * clocks for _ in schedule.rows]
    for task, (start, _) in clock(schedule, {"F": 1, "B": 1, "U": 0}).items():
        row = rows[schedule.mesh_of(task.stage)]
        if task.phase == "U":
            row[-1] = "U"
        else:
            row[int(start)] = f"{task.phase}{task.micro_batch}"
    return [" ".join(row) for row in rows]


@pytest.mark.parametrize(
    "golden", INSTANCES, ids=lambda x: f"{x['schedule']}-{x['meshes']}-{x['micro_batches']}"
)
def test_clocks_and_memory_equal_the_golden_grids(golden):
    schedule = make_schedule(
        golden["schedule"], Pipeline(golden["meshes"], golden["micro_batches"])
    )
    # one more for the update, idle in inference
    assert schedule.makespan({"F": 1, "B": 1, "U": 0}) + 1 == golden["clocks"]
    if golden["in_flight"]:
        assert most_in_flight(schedule) == schedule.in_flight() == golden["in_flight"]
    if "grid" in golden:
        assert grid(schedule, golden["clocks"]) == golden["grid"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "inference"])
def test_microbatches_that_wait_are_those_in_flight_but_the_one_that_runs(name):
    chunks = 2 if name == "interleaved_1f1b" else 1
    schedule = make_schedule(name, Pipeline(4, 8, chunks))
    for stage, in_flight in enumerate(schedule.in_flight()):
        assert schedule.waiting(stage) == {(in_flight - 1, 0)}


def test_microbatches_of_the_last_stage_wait_for_their_weight_gradients_alone():
    schedule = make_schedule("zero_bubble_h1", Pipeline(4, 8))
    assert schedule.waiting(3) == {(0, schedule.in_flight()[3] - 1)}
    assert schedule.in_flight()[3] > 1
    for stage in range(4):
        assert all(sum(pair) < schedule.in_flight()[stage] for pair in schedule.waiting(stage))


@pytest.mark.parametrize(
    ("meshes", "micro_batches", "name", "chunks", "makespan", "ideal"),
    [
        (4, 8, "1f1b", 1, 33, 24),
        (4, 8, "zero_bubble_h1", 1, 27, 24),
        (4, 8, "interleaved_1f1b", 2, 57, 48),
        (4, 8, "interleaved_1f1b", 4, 105, 96),
        (8, 32, "1f1b", 1, 117, 96),
        (8, 32, "zero_bubble_h1", 1, 103, 96),
        (8, 32, "interleaved_1f1b", 2, 213, 192),
    ],
)
def test_the_makespan_is_that_of_the_papers(meshes, micro_batches, name, chunks, makespan, ideal):
    assert (
        make_schedule(name, Pipeline(meshes, micro_batches, chunks)).makespan(EQUAL_THIRDS)
        == makespan
    )
    assert 3 * micro_batches * chunks == ideal  # forward takes 1, backward 2


pipelines = st.builds(Pipeline, st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))


def schedules_of(pipeline: Pipeline) -> list[Schedule]:
    """Return all schedules that the pipeline may have."""
    names = [
        name
        for name in schedule_names()
        if schedule_kind(name).num_chunks in (None, pipeline.num_chunks)
    ]
    if pipeline.num_micro_batches < 2 * pipeline.num_meshes:
        names = [name for name in names if name != "dualpipe_v"]
    return [make_schedule(name, pipeline) for name in names]


@given(pipelines)
def test_every_task_runs_once_after_its_dependencies(pipeline):
    for schedule in schedules_of(pipeline):
        finished = set()
        for _, task in walk(schedule.program()):
            if isinstance(task, Run):
                assert set(schedule.needs(task)) <= finished
                assert task not in finished
                finished.add(task)
        phases = (
            "FIW"
            if splits_backward(schedule.name)
            else "FB"
            if has_backward(schedule.name)
            else "F"
        )
        batches, stages = range(pipeline.num_micro_batches), range(pipeline.num_stages)
        updates = {Run(stage, "U") for stage in stages} if has_backward(schedule.name) else set()
        assert (
            finished
            == {Run(s, phase, b) for s in stages for phase in phases for b in batches} | updates
        )


@given(pipelines)
def test_activations_in_flight_are_as_the_schedule_declares(pipeline):
    for schedule in schedules_of(pipeline):
        kind = schedule_kind(schedule.name)
        in_flight = most_in_flight(schedule)
        if not has_backward(schedule.name):
            continue
        assert in_flight == [kind.in_flight(mesh, pipeline) for mesh in range(pipeline.num_meshes)]
        if pipeline.num_chunks == 1:
            assert schedule.in_flight() == in_flight
        if schedule.name == "1f1b":
            assert all(n <= pipeline.num_meshes - mesh for mesh, n in enumerate(in_flight))


def test_the_slowest_stage_determines_the_makespan():
    schedule = make_schedule("1f1b", Pipeline(3, 10))
    seconds = {0: 1.0, 1: 4.0, 2: 1.0}
    # Filling takes 1 and draining 1. Between them the slow stage runs 10 times forward and
    # backward, with one round trip to stage 2, which takes 2.
    makespan = schedule.makespan(lambda task: 0.0 if task.phase == "U" else seconds[task.stage])
    assert 10 * 8 <= makespan <= 1 + 10 * 8 + 2 + 1


@given(
    pipelines,
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_the_makespan_is_the_end_of_the_last_task(pipeline, scale, transfer, step):
    """Stages have random speeds, and transfers take longer over larger distances."""

    def seconds(task: Run) -> float:
        return float(scale[task.stage % 8] * (1 + "FBUIW".index(task.phase)))

    for schedule in schedules_of(pipeline):
        spans = clock(schedule, seconds, lambda source, to: transfer + step * abs(source - to))
        last = max(end for _, end in spans.values())
        assert (
            schedule.makespan(seconds, lambda source, to: transfer + step * abs(source - to))
            == last
        )


def test_a_cyclic_order_is_a_deadlock():
    rows = ((Run(0, "B", 0), Run(0, "F", 0)), (Run(1, "F", 0), Run(1, "B", 0)))
    with pytest.raises(DeadlockError, match="> recv 1B0<1"):
        Schedule("wrong", Pipeline(2, 1), rows).makespan(EQUAL_THIRDS)


def test_a_schedule_without_all_tasks_is_refused():
    with pytest.raises(ValueError, match="3 tasks, 3 distinct; expected 4"):
        Schedule("wrong", Pipeline(2, 1), ((Run(0, "F"), Run(0, "B")), (Run(1, "F"),)))


def test_tasks_of_a_stage_on_several_meshes_are_refused():
    with pytest.raises(ScheduleError, match="task 0F0 is on mesh 0, its stage is not"):
        Schedule("wrong", Pipeline(2, 1), ((Run(0, "F"), Run(1, "F")), (Run(0, "B"), Run(1, "B"))))


def test_the_error_of_an_unknown_schedule_lists_the_known_ones():
    with pytest.raises(ValueError, match="'1f2b'; expected one of gpipe, 1f1b,"):
        make_schedule("1f2b", Pipeline(2, 2))


def test_a_number_of_chunks_that_a_schedule_does_not_allow_is_refused():
    message = "use num_chunks=1, or one of interleaved_1f1b, zero_bubble_v, dualpipe_v"
    with pytest.raises(ScheduleError, match=message):
        make_schedule("1f1b", Pipeline(2, 2, 2))
    with pytest.raises(
        ScheduleError, match=r"'zero_bubble_v' runs 2 stage\(s\) per mesh, not 1; use num_chunks=2"
    ):
        make_schedule("zero_bubble_v", Pipeline(2, 2))


ZERO_BUBBLE_V = """\
mesh 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 \
3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 0U0 3U0
mesh 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 \
1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3 1U0 2U0"""

DUALPIPE_V = """\
mesh 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 \
3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2 0I3 0W3 0U0 3U0
mesh 1: 1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 \
2F3 1I1 1W1 2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3 1U0 2U0"""


@pytest.mark.parametrize(
    ("name", "expected"), [("zero_bubble_v", ZERO_BUBBLE_V), ("dualpipe_v", DUALPIPE_V)]
)
def test_v_schedules_have_the_recorded_orders(name, expected):
    assert str(make_schedule(name, Pipeline(2, 4, 2))) == expected


@given(st.integers(1, 8), st.integers(0, 20))
def test_zero_bubble_v_has_no_bubble_in_the_memory_of_1f1b(meshes, extra_batches):
    """With equal F, I and W a mesh is idle only before its first and after its last task.

    Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory", 2024.
    """
    pipeline = Pipeline(meshes, 2 * meshes + extra_batches, 2)
    schedule = make_schedule("zero_bubble_v", pipeline)
    assert most_in_flight(schedule) == [2 * meshes] * meshes
    spans = clock(schedule, EQUAL_THIRDS)
    for mesh, row in enumerate(schedule.rows):
        begin, end = spans[row[0]][0], spans[row[-1]][1]
        assert (begin, end - begin) == (mesh, 6 * pipeline.num_micro_batches)


@given(st.integers(1, 8), st.integers(0, 20))
def test_the_bubble_of_dualpipe_v_is_less_than_a_task_per_mesh(meshes, extra_batches):
    pipeline = Pipeline(meshes, 2 * meshes + extra_batches, 2)
    schedule = make_schedule("dualpipe_v", pipeline)
    assert schedule.makespan(EQUAL_THIRDS) == 6 * pipeline.num_micro_batches + meshes - 1
    assert max(most_in_flight(schedule)) <= 2 * meshes + 1


def test_dualpipe_v_needs_twice_as_many_microbatches_as_meshes():
    with pytest.raises(
        ScheduleError, match="at least twice as many microbatches as meshes: 8 for 4 meshes, not 7"
    ):
        make_schedule("dualpipe_v", Pipeline(4, 7, 2))


def last_batch_first(mesh, pipeline):
    """Yield a user's schedule: gpipe with the last microbatch first in the backward pass."""
    yield from (Run(mesh, "F", batch) for batch in range(pipeline.num_micro_batches))
    yield from (Run(mesh, "B", batch) for batch in reversed(range(pipeline.num_micro_batches)))
    yield Run(mesh, "U")


def test_forwards_only_of_a_shipped_schedule_have_its_stages_on_the_same_meshes():
    for name in schedule_names():
        pipeline = Pipeline(2, 4, schedule_kind(name).num_chunks or 2)
        schedule = make_schedule(name, pipeline)
        forward = make_schedule(schedule_kind(name).forward, pipeline)
        assert forward.phases == {"F"}
        for stage in range(pipeline.num_stages):
            assert forward.mesh_of(stage) == schedule.mesh_of(stage), name


def test_no_step_follows_a_schedule_that_names_no_forwards_only(monkeypatch):
    monkeypatch.setattr(pipeline_schedules, "_KINDS", dict(pipeline_schedules._KINDS))
    autopar.register_schedule("alone", last_batch_first)
    assert schedule_kind("alone").forward == ScheduleKind(last_batch_first, len, "").forward == ""


@pytest.fixture
def registered_name():
    autopar.register_schedule(
        "last_batch_first", last_batch_first, forward="inference", summary="for a test"
    )
    yield "last_batch_first"
    del pipeline_schedules._KINDS["last_batch_first"]


def test_a_registered_schedule_runs_and_can_not_be_registered_again(registered_name):
    assert registered_name in schedule_names()
    assert schedule_kind(registered_name).in_flight(0, Pipeline(2, 5)) == 5
    method = pipeline(
        pipeline_schedule=registered_name, devices=2, stage_option=autopar.UniformStageOption(2)
    )
    assert_as_serial(stack_step, method, stack_params(), stack_batch())
    already = "there is a pipeline schedule 'last_batch_first' already"
    with pytest.raises(ScheduleError, match=already):
        autopar.register_schedule(registered_name, last_batch_first)


def backward_first(mesh, pipeline):
    yield Run(mesh, "B", 0)
    yield from (Run(mesh, "F", batch) for batch in range(pipeline.num_micro_batches))
    yield from (Run(mesh, "B", batch) for batch in range(1, pipeline.num_micro_batches))
    yield Run(mesh, "U")


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (backward_first, "task 1B0 comes before 1F0"),
        (lambda mesh, pipeline: [Run(mesh, "F", 0)], "expected 16"),
        (
            lambda mesh, pipeline: last_batch_first(1 - mesh, pipeline),
            "stage 0 is on mesh 1, expected mesh 0",
        ),
    ],
)
def test_a_schedule_that_can_not_run_is_not_registered(row, error):
    with pytest.raises(ValueError, match=error):
        autopar.register_schedule("wrong", row)
    assert "wrong" not in schedule_names()


def test_a_pipeline_without_microbatches_is_refused():
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        Pipeline(2, 0)
