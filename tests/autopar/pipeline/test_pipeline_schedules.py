import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.pipeline.pipeline_schedules import Pipeline, Schedule, make_schedule, schedule_kind, schedule_names
from simulator.program import DeadlockError, Run, walk

INSTANCES = json.loads((Path(__file__).parents[2] / "golden" / "schedules.json").read_text())["instances"]
EQUAL_THIRDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}


def held_by_meshes(schedule: Schedule) -> list[int]:
    """Of how many (stage, microbatch) each mesh holds activations at most, by the tasks that it runs."""
    release = "W" if "W" in schedule.phases else "B" if "B" in schedule.phases else "F"
    most = []
    for row in schedule.rows:
        held = [0]
        for task in row:
            if task.phase == "F":
                held.append(held[-1] + 1)
            if task.phase == release:
                held.append(held[-1] - 1)
        most.append(max(held))
    return most


def grid(schedule: Schedule, clocks: int) -> list[str]:
    """What each mesh runs at each clock, in the words of the golden file; updates wait for the last clock."""
    rows = [["."] * clocks for _ in schedule.rows]
    for task, (start, _) in schedule.clock({"F": 1, "B": 1, "U": 0}).items():
        row = rows[schedule.pipeline.mesh_of(task.stage)]
        if task.phase == "U":
            row[-1] = "U"
        else:
            row[int(start)] = f"{task.phase}{task.micro_batch}"
    return [" ".join(row) for row in rows]


@pytest.mark.parametrize("golden", INSTANCES, ids=lambda x: f"{x['schedule']}-{x['meshes']}-{x['micro_batches']}")
def test_clocks_and_memory_are_the_recorded_ones(golden):
    schedule = make_schedule(golden["schedule"], Pipeline(golden["meshes"], golden["micro_batches"]))
    assert (
        schedule.makespan({"F": 1, "B": 1, "U": 0}) + 1 == golden["clocks"]
    )  # one more for the update, idle in inference
    if golden["in_flight"]:
        assert held_by_meshes(schedule) == schedule.in_flight() == golden["in_flight"]
    if "grid" in golden:
        assert grid(schedule, golden["clocks"]) == golden["grid"]


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
def test_the_bubble_is_what_the_papers_say(meshes, micro_batches, name, chunks, makespan, ideal):
    assert make_schedule(name, Pipeline(meshes, micro_batches, chunks)).makespan(EQUAL_THIRDS) == makespan
    assert 3 * micro_batches * chunks == ideal  # forward 1, backward 2


pipelines = st.builds(Pipeline, st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))


def schedules_of(pipeline: Pipeline) -> list[Schedule]:
    names = schedule_names() if pipeline.num_chunks == 1 else ("interleaved_1f1b",)
    return [make_schedule(name, pipeline) for name in names]


@given(pipelines)
def test_every_task_runs_once_after_what_it_needs(pipeline):
    for schedule in schedules_of(pipeline):
        done = set()
        for _, task in walk(schedule.program()):
            if isinstance(task, Run):
                assert set(schedule.needs(task)) <= done
                assert task not in done
                done.add(task)
        phases = "F" if schedule.name == "inference" else "FIW" if schedule.name == "zero_bubble_h1" else "FB"
        batches, stages = range(pipeline.num_micro_batches), range(pipeline.num_stages)
        updates = {Run(stage, "U") for stage in stages} if schedule.name != "inference" else set()
        assert done == {Run(s, phase, b) for s in stages for phase in phases for b in batches} | updates


@given(pipelines)
def test_activations_in_flight_are_those_announced(pipeline):
    for schedule in schedules_of(pipeline):
        kind = schedule_kind(schedule.name)
        held = held_by_meshes(schedule)
        assert held == [kind.in_flight(mesh, pipeline) for mesh in range(pipeline.num_meshes)]
        if pipeline.num_chunks == 1:
            assert schedule.in_flight() == held
        if schedule.name == "1f1b":
            assert all(n <= pipeline.num_meshes - mesh for mesh, n in enumerate(held))


def test_a_slow_stage_sets_the_pace():
    schedule = make_schedule("1f1b", Pipeline(3, 10))
    seconds = {0: 1.0, 1: 4.0, 2: 1.0}
    # fill 1, then 10 times forward and backward of the slow stage with one round trip to stage 2 (2) in between, drain 1
    makespan = schedule.makespan(lambda task: 0.0 if task.phase == "U" else seconds[task.stage])
    assert 10 * 8 <= makespan <= 1 + 10 * 8 + 2 + 1


@given(pipelines, st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 5), st.integers(0, 3))
def test_the_makespan_is_when_the_last_clock_stops(pipeline, scale, transfer, step):
    """Stages of any speed, transfers that take longer the farther they go."""

    def seconds(task: Run) -> float:
        return float(scale[task.stage % 8] * (1 + "FBUIW".index(task.phase)))

    for schedule in schedules_of(pipeline):
        spans = schedule.clock(seconds, lambda source, to: transfer + step * abs(source - to))
        last = max(end for _, end in spans.values())
        assert schedule.makespan(seconds, lambda source, to: transfer + step * abs(source - to)) == last


def test_an_order_that_can_not_run_is_a_deadlock():
    rows = ((Run(0, "B", 0), Run(0, "F", 0)), (Run(1, "F", 0), Run(1, "B", 0)))
    with pytest.raises(DeadlockError, match="> recv 1B0<1"):
        Schedule("wrong", Pipeline(2, 1), rows).makespan(EQUAL_THIRDS)


def test_a_task_left_out_is_refused():
    with pytest.raises(ValueError, match="3 tasks, 3 distinct; expected 4"):
        Schedule("wrong", Pipeline(2, 1), ((Run(0, "F"), Run(0, "B")), (Run(1, "F"),)))


def test_a_task_on_the_wrong_mesh_is_refused():
    with pytest.raises(ValueError, match="task 1F0 is on mesh 0"):
        Schedule("wrong", Pipeline(2, 1), ((Run(0, "F"), Run(1, "F")), ()))


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'1f2b'; expected one of gpipe, 1f1b,"):
        make_schedule("1f2b", Pipeline(2, 2))


def test_several_chunks_need_the_interleaved_schedule():
    with pytest.raises(ValueError, match="use 'interleaved_1f1b'"):
        make_schedule("1f1b", Pipeline(2, 2, 2))


def test_a_pipeline_of_nothing_is_refused():
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        Pipeline(2, 0)
