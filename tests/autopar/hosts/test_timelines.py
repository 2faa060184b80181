"""Timelines of workers on one clock; an executable on hosts reports what a local one does."""

import json
import re
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.hosts.clocks import offset
from autopar.hosts.remote_executable import RemoteExecutable
from autopar.hosts.timelines import ExecutedInstruction, aligned, merged
from autopar.report import Status
from autopar.runtime.local_backend import LOCAL, backend, use_backend
from autopar.runtime.local_executable import LocalExecutable
from simulator.program import Free, Recv, Run, Send
from tests.autopar.hosts.workers import pipeline
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step

# --- clocks and notes, without Ray


class OtherClock:
    """A clock that is `shift` seconds ahead, and the delays of requests to it."""

    def __init__(self, shift: float, delays: list[tuple[float, float]]) -> None:
        self._now, self._shift, self._delays = 100.0, shift, iter(delays)

    def now(self) -> float:
        return self._now

    def ask(self) -> float:
        outward, back = next(self._delays)
        self._now += outward
        shown = self._now + self._shift
        self._now += back
        return shown


delay = st.floats(1e-4, 1.0)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(delay, delay), min_size=20, max_size=20))
def test_the_error_of_a_clock_offset_is_at_most_half_of_the_shortest_round_trip(shift, delays):
    clock = OtherClock(shift, delays)
    error = offset(clock.ask, clock.now) + shift
    assert abs(error) <= min(outward + back for outward, back in delays) / 2 + 1e-8


F, B = Run(0, "F"), Run(1, "F")
PROGRAM = (F, Send("x", 1), Free(("x",))), (Recv("x", 0), B)


def notes_of(
    times: list[tuple[float, float]], mesh: int, instructions: Any
) -> list[ExecutedInstruction]:
    return [
        ExecutedInstruction(mesh, instruction, *interval)
        for instruction, interval in zip(instructions, times, strict=True)
    ]


def test_merged_timelines_correct_the_offset_of_a_clock():
    first = notes_of([(10.0, 11.0), (11.0, 11.5), (11.5, 11.6)], 0, PROGRAM[0])
    second = notes_of([(4.0, 6.0), (6.0, 7.0)], 1, PROGRAM[1])  # the clock is 6 seconds late
    timeline = merged([first, aligned(second, 6.0)], ((0,), (1,)), ())
    spans = [(span.mesh, span.name, span.start, span.end, span.category) for span in timeline.spans]
    assert spans == [
        (0, "0F0", 0.0, 1.0, "task"),
        (0, "send x>1", 1.0, 1.5, "send"),
        (1, "recv x<0", 0.0, 2.0, "bubble"),
        (1, "1F0", 2.0, 3.0, "task"),
    ]
    (arrow,) = timeline.arrows
    assert (arrow.sent, arrow.received) == (1.0, 2.0)
    assert timeline.makespan == 3.0


def test_spans_of_hosts_that_share_a_mesh_begin_and_end_with_the_earliest():
    one = notes_of([(0.0, 1.0), (1.5, 2.0), (2.0, 2.1)], 0, PROGRAM[0])
    other = notes_of([(0.2, 0.9), (0.9, 3.0), (3.0, 3.1)], 0, PROGRAM[0])
    receiver = notes_of([(0.0, 2.5), (2.5, 3.0)], 1, PROGRAM[1])
    spans = merged([one, other, receiver], ((0, 1), (2,)), ()).spans
    assert [(span.start, span.end) for span in spans if span.mesh == 0] == [(0.0, 0.9), (0.9, 2.0)]


# --- on a Ray cluster


ARGS = stack_params(), stack_batch()


@cache
def remote() -> RemoteExecutable:
    function = autopar.parallelize(stack_step, method=pipeline(4), donate_argnums=(0,))
    executable = function.get_executable(*ARGS)
    assert isinstance(executable, RemoteExecutable)
    return executable


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_each_worker_executes_the_instructions_of_the_program_in_order(hosts):
    notes = remote().recorded()
    for mesh, row in enumerate(remote().program.instructions):
        (worker,) = (
            worker_notes
            for worker_notes in notes
            if any(note.mesh == mesh for note in worker_notes)
        )
        assert tuple(note.instruction for note in worker if note.mesh == mesh) == row
    assert all(a.end <= b.start for worker_notes in notes for a, b in pairwise(worker_notes))


@pytest.mark.hosts(2, 4)
def test_the_timeline_of_workers_has_every_instruction_of_the_program_in_order(hosts, tmp_path):
    executable = remote()
    timeline = executable.dump_stage_execution_trace(tmp_path / "trace.json")
    assert timeline.meshes == executable.program.meshes
    assert timeline.memory == executable.memory
    for mesh, row in enumerate(executable.program.instructions):
        spans = [span for span in timeline.spans if span.mesh == mesh]
        assert [span.name for span in spans] == [
            str(instruction) for instruction in row if not isinstance(instruction, Free)
        ]
        assert all(a.end <= b.start for a, b in pairwise(spans))
    sends = sum(
        isinstance(instruction, Send)
        for row in executable.program.instructions
        for instruction in row
    )
    assert len(timeline.arrows) == sends
    assert all(arrow.sent < arrow.received for arrow in timeline.arrows)
    assert min(span.start for span in timeline.spans) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0", "3F0", "3B3"}


@pytest.mark.hosts(2, 4)
def test_a_pipeline_on_hosts_reports_the_same_as_one_in_this_process(hosts, tmp_path):
    remote_executable = remote()
    local = _in_this_process(remote_executable.plan, (0,))
    assert remote_executable.memory == local.memory
    assert remote_executable.get_total_allocation_size() == local.get_total_allocation_size()
    assert remote_executable.get_stage_allocation_size() == local.get_stage_allocation_size()
    assert remote_executable.get_stage_execution_info() == local.get_stage_execution_info()
    programs: list[tuple[int, Status]] = [(0, "optimized"), (1, "annotated"), (3, "partitioned")]
    for stage, status in programs:
        assert _essentials(remote_executable.get_hlo_text(status, stage)) == _essentials(
            local.get_hlo_text(status, stage)
        )
    assert _specs(remote_executable.in_shardings) == _specs(local.in_shardings)
    assert _specs(remote_executable.out_shardings) == _specs(local.out_shardings)
    assert repr(remote_executable.get_input_placement_specs()) == repr(
        local.get_input_placement_specs()
    )
    assert repr(remote_executable.get_output_placement_specs()) == repr(
        local.get_output_placement_specs()
    )
    assert _names(remote_executable, tmp_path / "remote") == _names(local, tmp_path / "local")
    with pytest.raises(ValueError, match=r"stage 4.*0 to 3"):
        remote_executable.get_hlo_text(stage=4)
    with pytest.raises(ValueError, match="status 'traced' for a pipeline"):
        remote_executable.get_hlo_text("traced")
    with pytest.raises(ValueError, match="structure"):
        remote_executable(stack_params())


@pytest.mark.slow
@pytest.mark.hosts(2, 4)
def test_a_step_on_one_mesh_over_hosts_reports_the_same_as_one_in_this_process(hosts, tmp_path):
    remote_executable = autopar.parallelize(
        stack_step, method=autopar.ShardParallel(devices=(2, 4))
    ).get_executable(*ARGS)
    assert isinstance(remote_executable, RemoteExecutable)
    local = _in_this_process(remote_executable.plan)
    assert remote_executable.memory == local.memory
    assert remote_executable.get_total_allocation_size() == local.get_total_allocation_size()
    assert remote_executable.get_hlo_text("traced") == local.get_hlo_text("traced")
    statuses: list[Status] = ["annotated", "partitioned", "optimized"]
    for status in statuses:
        assert _essentials(remote_executable.get_hlo_text(status)) == _essentials(
            local.get_hlo_text(status)
        )
    assert _specs(remote_executable.in_shardings) == _specs(local.in_shardings)
    assert _specs(remote_executable.out_shardings) == _specs(local.out_shardings)
    assert _names(remote_executable, tmp_path / "remote") == _names(local, tmp_path / "local")
    with pytest.raises(ValueError, match="unknown status 'final'; expected one of traced"):
        remote_executable.get_hlo_text("final")  # pyright: ignore[reportArgumentType]
    notes = remote_executable.recorded()
    instructions = [[note.instruction for note in worker_notes] for worker_notes in notes]
    assert instructions.count([Run(0, "S")]) == 2
    (span,) = remote_executable.dump_stage_execution_trace(tmp_path / "trace.json").spans
    assert (span.name, span.category, span.start) == ("0S0", "task", 0)


def _in_this_process(plan: autopar.Plan, donated: tuple[int, ...] = ()) -> Any:
    """Return the executable of the same plan in this process."""
    outer_backend = backend()
    use_backend(LOCAL)
    try:
        function = autopar.parallelize(
            stack_step, method=autopar.PlanMethod(plan), donate_argnums=donated
        )
        executable = function.get_executable(*ARGS)
    finally:
        use_backend(outer_backend)
    assert isinstance(executable, LocalExecutable)
    return executable


def _essentials(text: str) -> list[str]:
    """Return the parts of a program that do not depend on export: tasks, products, collectives."""
    return re.findall(
        r"// task \w+|^HloModule|^module|dot_general|\b(?:dot|all-\w+|reduce-scatter)\(",
        text,
        re.MULTILINE,
    )


def _specs(shardings: Any) -> Any:
    return jax.tree.map(lambda sharding: (sharding.spec, sharding.mesh.shape), shardings)


def _names(executable: Any, folder: Any) -> list[str]:
    return [path.name for path in executable.dump_debug_info(folder, "step")]
