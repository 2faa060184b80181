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
def test_every_read_finds_its_value_and_nothing_is_left_but_inputs_and_outputs(case: Any) -> None:
    whole = planned(*case)
    partition, names, mesh_of = whole.partition, whole.names, whole.schedule.mesh_of
    numbers = range(whole.step.num_micro_batches)
    inputs = {names.of(var, k) for var in whole.step.jaxpr.invars for k in numbers}
    sums = {
        names.of(each.sum, 0): mesh_of(task.stage)
        for task, totals in partition.totals.items()
        for each in totals
    }
    has = [
        inputs | {name for name, where in sums.items() if where == mesh}
        for mesh in range(len(whole.program.meshes))
    ]
    sent: set[tuple[str, int]] = set()
    for mesh, each in walk(whole.program):
        match each:
            case Run():
                task = task_of(each)
                assert {names.of(var, each.micro_batch) for var in partition.reads[task]} <= has[
                    mesh
                ]
                has[mesh] |= {names.of(var, each.micro_batch) for var in partition.results[task]}
            case Send(name, to):
                assert name in has[mesh]
                assert (name, to) not in sent
                sent.add((name, to))
            case Recv(name):
                has[mesh].add(name)
            case Free(values):
                assert set(values) <= has[mesh]
                has[mesh] -= set(values)
    outputs = {
        names.of(part, k)
        for part in map(partition.microbatch_value, whole.step.jaxpr.outvars)
        if part in partition.producers
        for k in numbers
    }
    assert all(left <= inputs | outputs for left in has)
    assert outputs <= set().union(*has)
