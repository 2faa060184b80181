"""Programs of pipelines define values before use and free them after, in every schedule."""

from collections.abc import Callable
from typing import Any

import pytest

import autopar
from autopar.lowering.instructions import task_of
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.pipeline_schedules import has_backward, schedule_kind, schedule_names
from autopar.planning.method_planning import trace_for
from simulator.program import Free, Recv, Run, Send, walk
from tests.autopar.pipeline.stack_steps import (
    pipeline,
    stack,
    stack_batch,
    stack_params,
    stack_step,
)
from tests.autopar.pipeline.test_pipelined_steps import tied_args, tied_step


def planned(step: Callable[..., Any], args: Any, schedule: str, devices: int) -> PlannedStep:
    chunks = schedule_kind(schedule).num_chunks or (2 if schedule == "interleaved_1f1b" else 1)
    layers = None if has_backward(schedule) else autopar.ManualLayerOption()
    stages = autopar.UniformStageOption(4 if chunks == 2 else None)
    options = dict(
        pipeline_schedule=schedule, num_chunks=chunks, layer_option=layers, stage_option=stages
    )
    plan = autopar.plan_step(
        step, args, method=pipeline(devices=devices, **options), cluster="cpu-virtual"
    )
    return PlannedStep(trace_for(plan, step, args, (1,)), plan)


def cases() -> list[Any]:
    stacks = [
        (stack_step, (stack_params(), stack_batch()), name, 4)
        for name in schedule_names()
        if has_backward(name)
    ]
    infer = [
        (stack, (stack_params(), stack_batch()["x"]), name, 4)
        for name in ("inference", "inference_v")
    ]
    return [
        *stacks,
        *infer,
        (tied_step, tied_args(), "1f1b", 6),
        (tied_step, tied_args(), "zero_bubble_h1", 3),
    ]


@pytest.mark.parametrize(
    "case", cases(), ids=lambda case: f"{case[0].__name__}-{case[2]}-{case[3]}"
)
def test_values_are_stored_before_they_are_read_and_all_but_inputs_and_outputs_are_freed(
    case: Any,
) -> None:
    step_plan = planned(*case)
    partition, names, mesh_of = step_plan.partition, step_plan.names, step_plan.schedule.mesh_of
    numbers = range(step_plan.step.num_micro_batches)
    inputs = {names.of(var, k) for var in step_plan.step.jaxpr.invars for k in numbers}
    sums = {
        names.of(total.sum, 0): mesh_of(task.stage)
        for task, totals in partition.totals.items()
        for total in totals
    }
    stored = [
        inputs | {name for name, sum_mesh in sums.items() if sum_mesh == mesh}
        for mesh in range(len(step_plan.program.meshes))
    ]
    sent: set[tuple[str, int]] = set()
    for mesh, instruction in walk(step_plan.program):
        match instruction:
            case Run():
                task = task_of(instruction)
                assert {
                    names.of(var, instruction.micro_batch) for var in partition.reads[task]
                } <= stored[mesh]
                stored[mesh] |= {
                    names.of(var, instruction.micro_batch) for var in partition.results[task]
                }
            case Send(name, to):
                assert name in stored[mesh]
                assert (name, to) not in sent
                sent.add((name, to))
            case Recv(name):
                stored[mesh].add(name)
            case Free(values):
                assert set(values) <= stored[mesh]
                stored[mesh] -= set(values)
    outputs = {
        names.of(part, k)
        for part in step_plan.step.jaxpr.outvars
        if part in partition.producers
        for k in numbers
    }
    assert all(values_left <= inputs | outputs for values_left in stored)
    assert outputs <= set().union(*stored)
