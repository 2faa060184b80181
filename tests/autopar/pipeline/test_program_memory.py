"""Memory of pipelines after each instruction, for random orders of their tasks."""

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
    """Draw a planned pipeline whose tasks run in a random order that respects dependencies."""
    step_plan = copy(planned(*draw(st.sampled_from(SHAPES)), draw(st.sampled_from([2, 4, 8]))))
    tasks = [task for row in step_plan.schedule.rows for task in row]
    waiting = {task: set(step_plan.schedule.needs(task)) for task in tasks}
    rows: list[list[Run]] = [[] for _ in step_plan.schedule.rows]
    random = draw(st.randoms(use_true_random=False))
    while waiting:
        task = random.choice([task for task, dependencies in waiting.items() if not dependencies])
        rows[step_plan.schedule.mesh_of(task.stage)].append(task)
        del waiting[task]
        for dependencies in waiting.values():
            dependencies.discard(task)
    step_plan.__dict__["schedule"] = Schedule(
        "any", step_plan.schedule.pipeline, tuple(map(tuple, rows))
    )
    step_plan.__dict__.pop("instructions", None)
    return step_plan


@given(pipelines(), st.randoms(use_true_random=False))
def test_memory_is_never_negative_and_returns_to_the_baseline(
    step_plan: PlannedStep, random
) -> None:
    memory, program, partition = MeshMemory(step_plan), step_plan.program, step_plan.partition
    for task in sorted(
        {
            task_of(instruction)
            for row in program.instructions
            for instruction in row
            if isinstance(instruction, Run)
        }
    ):
        results = [
            *partition.results[task],
            *(total.sum for total in partition.totals.get(task, ())),
        ]
        size = sum(step_plan.values[task.stage].device_bytes(var) for var in results)
        memory.add_task(
            task, MemoryUse(aliased=random.randint(0, size), temporaries=random.randint(0, 5000))
        )
    levels = memory.levels(program)
    empty_program = replace(program, instructions=tuple((Free(()),) for _ in program.meshes))
    for row, ((_, before),), use in zip(
        levels, memory.levels(empty_program), memory.peaks(levels), strict=True
    ):
        row_levels = [level for levels_after in row for level in levels_after]
        assert min(size for level in row_levels for size in level.values()) >= 0
        totals = [sum(level.values()) for level in row_levels]
        # the update frees the sums of gradients
        baseline = {role: size for role, size in before.items() if role != "gradients"}
        assert row_levels[-1] == baseline
        assert min(totals) >= sum(baseline.values())
        assert max(totals) == use.total
