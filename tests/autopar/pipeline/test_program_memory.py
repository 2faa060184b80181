"""Memory of pipelines after each instruction, in any order of their tasks."""

from copy import copy
from dataclasses import replace
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.lowering.instructions import task_of
from autopar.lowering.planned import PlannedStep
from autopar.lowering.program_memory import MeshMemory
from autopar.pipeline.pipeline_schedules import Schedule
from autopar.planning.method_planning import trace_for
from simulator.memory import MemoryUse
from simulator.program import Free, Run
from tests.autopar.pipeline.stack_steps import pipeline, stack_batch, stack_params, stack_step


@cache
def planned(name: str, stages: int, chunks: int, num_micro_batches: int) -> PlannedStep:
    method = pipeline(
        num_micro_batches,
        pipeline_schedule=name,
        num_chunks=chunks,
        stage_option=autopar.UniformStageOption(stages),
    )
    args = stack_params(), stack_batch()
    plan = autopar.plan_step(
        stack_step, args, method=method, cluster="cpu-virtual", mesh_shape=(4,)
    )
    return PlannedStep(trace_for(plan, stack_step, args, (1,)), plan)


SHAPES = [("1f1b", 2, 1), ("1f1b", 4, 1), ("zero_bubble_h1", 4, 1), ("interleaved_1f1b", 4, 2)]


@st.composite
def pipelines(draw: st.DrawFn) -> PlannedStep:
    """Draw a planned pipeline whose tasks run in any order that respects dependencies."""
    whole = copy(planned(*draw(st.sampled_from(SHAPES)), draw(st.sampled_from([2, 4, 8]))))
    tasks = [task for row in whole.schedule.rows for task in row]
    waiting = {task: set(whole.schedule.needs(task)) for task in tasks}
    rows: list[list[Run]] = [[] for _ in whole.schedule.rows]
    random = draw(st.randoms(use_true_random=False))
    while waiting:
        task = random.choice([task for task, needed in waiting.items() if not needed])
        rows[whole.schedule.mesh_of(task.stage)].append(task)
        del waiting[task]
        for needed in waiting.values():
            needed.discard(task)
    whole.__dict__["schedule"] = Schedule("any", whole.schedule.pipeline, tuple(map(tuple, rows)))
    whole.__dict__.pop("instructions", None)
    return whole


@given(pipelines(), st.randoms(use_true_random=False))
def test_memory_is_never_negative_and_returns_to_the_baseline(whole: PlannedStep, random) -> None:
    memory, program, partition = MeshMemory(whole), whole.program, whole.partition
    for task in sorted(
        {task_of(each) for row in program.instructions for each in row if isinstance(each, Run)}
    ):
        made = [*partition.results[task], *(each.sum for each in partition.totals.get(task, ()))]
        size = sum(whole.values[task.stage].device_bytes(var) for var in made)
        memory.add_task(
            task, MemoryUse(aliased=random.randint(0, size), temporaries=random.randint(0, 5000))
        )
    levels = memory.levels(program)
    nothing = replace(program, instructions=tuple((Free(()),) for _ in program.meshes))
    for row, ((_, before),), use in zip(
        levels, memory.levels(nothing), memory.peaks(levels), strict=True
    ):
        held = [level for each in row for level in each]
        assert min(size for level in held for size in level.values()) >= 0
        totals = [sum(level.values()) for level in held]
        baseline = {
            role: size for role, size in before.items() if role != "gradients"
        }  # The sums, which the update reads.
        assert held[-1] == baseline
        assert min(totals) >= sum(baseline.values())
        assert max(totals) == use.total
