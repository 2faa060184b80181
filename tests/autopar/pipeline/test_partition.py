"""Tasks of a partitioned step have each equation once and read no value before its definition."""

from functools import cache
from typing import Any

import pytest
from jax.extend.core import Var

import autopar
from autopar.ir.step_graph import StepGraph
from autopar.pipeline.partition import Partition, Task
from autopar.pipeline.partitioner import partition_step
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from experiments.models.model_sizes import SMALL
from tests.autopar.pipeline.stack_steps import stack_batch, stack_params, stack_step
from tests.autopar.pipeline.test_pipelined_steps import tied_args, tied_step
from tests.steps import model_step


@cache
def traced(name: str) -> StepGraph:
    if name == "stack":
        return trace(
            stack_step,
            (stack_params(), stack_batch()),
            (1,),
            4,
            TraceOptions(marked=True),
        )
    if name == "tied":
        return trace(tied_step, tied_args(), (1,), 4, TraceOptions(marked=True))
    model, layers = SMALL[name], autopar.AutoLayerOption(STEPS[name])
    return trace(
        model_step(model), model.abstract_args(), (1,), 1, TraceOptions(layers=layers, marked=True)
    )


STEPS = {"stack": 4, "tied": 3, "gpt": 3, "gpt_scanned": 2, "wide_resnet": 3}


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> tuple[StepGraph, range]:
    return traced(request.param), range(STEPS[request.param])


def order(partition: Partition) -> list[Task]:
    """Return the tasks in the order of one microbatch, then the update."""
    last = partition.num_stages - 1
    phases = {"F": 0, "B": 1, "I": 1, "W": 2, "U": 3}

    def key(task: Task) -> tuple[int, int, int]:
        depth = task.stage if task.phase == "F" else last - task.stage
        return phases[task.phase], task.round if task.phase == "U" else depth, task.stage

    return sorted(partition.eqns, key=key)


@pytest.mark.parametrize("split", [False, True])
def test_every_needed_equation_is_in_one_task_or_duplicated_from_small_inputs(
    step: Any, split: bool
) -> None:
    graph, stages = step
    partition = partition_step(graph, stages, split)
    micro = graph.microbatching
    assert micro is not None
    tasks: dict[int, list[Task]] = {}
    for task, eqns in partition.eqns.items():
        numbers = [number for number, _ in eqns]
        assert len(set(numbers)) == len(numbers)
        for number in numbers:
            tasks.setdefault(number, []).append(task)
    needed = {number for number, _ in (*micro.body, *micro.tail)}
    assert set(tasks) <= needed
    results = {number: graph.jaxpr.eqns[number].outvars for number in needed}
    marked = {atom for _, mark in micro.marks for atom in mark.invars if isinstance(atom, Var)}
    # no equation reads results of the others, for example the rest of a constant loss
    for number in needed - set(tasks):
        assert not any(var in marked or var in graph.jaxpr.outvars for var in results[number])
    small = set(graph.jaxpr.invars) | set(graph.jaxpr.constvars)
    for number, owners in tasks.items():
        if len(owners) > 1:  # an equation that depends on constants and small inputs alone
            reads = [a for a in graph.jaxpr.eqns[number].invars if isinstance(a, Var)]
            producers = [n for n in tasks if any(a in results[n] for a in reads)]
            assert all(a in small or any(a in results[n] for n in producers) for a in reads)
            assert all(len(tasks[n]) >= len(owners) for n in producers)


@pytest.mark.parametrize("split", [False, True])
def test_a_task_reads_only_values_of_earlier_tasks(step: Any, split: bool) -> None:
    graph, stages = step
    partition = partition_step(graph, stages, split)
    computed: set[Any] = set(graph.jaxpr.invars) | set(graph.jaxpr.constvars)
    totals: set[Any] = set()
    for task in order(partition):
        if task.phase == "U":
            computed |= totals
        assert computed.issuperset(partition.reads[task]), task
        computed |= set(partition.results[task])
        totals |= {total.sum for total in partition.totals.get(task, ())}
    assert computed.issuperset(a for a in graph.jaxpr.outvars if isinstance(a, Var))


def test_the_split_backward_pass_has_the_same_equations(step: Any) -> None:
    graph, stages = step
    whole, split = partition_step(graph, stages), partition_step(graph, stages, True)
    for stage in stages:
        halves = [number for phase in ("I", "W") for number, _ in split.eqns[Task(stage, phase)]]
        assert sorted(halves) == [number for number, _ in whole.eqns[Task(stage, "B")]]
        reads = {
            var
            for task in split.eqns
            if task.stage < stage and task.phase in "IW"
            for var in split.reads[task]
        }
        # no task of another stage reads gradients of weights
        assert reads.isdisjoint(split.results[Task(stage, "W")])


def test_a_sum_is_accumulated_by_the_task_that_has_its_summands(step: Any) -> None:
    graph, stages = step
    partition = partition_step(graph, stages)
    for task, totals in partition.totals.items():
        values = {var for _, eqn in partition.eqns[task] for var in eqn.outvars} | set(
            partition.reads[task]
        )
        assert all(not isinstance(total.part, Var) or total.part in values for total in totals)


def test_the_update_of_a_step_without_a_global_norm_has_one_round() -> None:
    assert {task.round for task in partition_step(traced("stack"), range(4)).eqns} == {0}
