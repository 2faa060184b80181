"""Tasks donate operands at their last use, and results reuse their memory."""

import warnings
from functools import cache
from typing import Any

import jax
import pytest

import autopar
from autopar.lowering.instructions import task_of
from autopar.pipeline.partition import Task
from autopar.runtime.local_executable import LocalExecutable
from autopar.util import memory_of
from simulator.program import Free, Run
from tests.autopar.pipeline.stack_steps import (
    WIDTH,
    pipeline,
    stack,
    stack_batch,
    stack_params,
    stack_step,
)

ACTIVATION = 4 * WIDTH * 4  # Bytes of 4 rows of a microbatch.
WEIGHT = WIDTH * WIDTH * 4


@cache
def compiled(schedule: str = "1f1b", donate: bool = True) -> LocalExecutable:
    method = pipeline(pipeline_schedule=schedule)
    parallel = autopar.parallelize(stack_step, method=method, donate_argnums=(0,) if donate else ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Donated operands are used.
        executable = parallel.get_executable(stack_params(), stack_batch())
    assert isinstance(executable, LocalExecutable)
    return executable


def aliased(executable: LocalExecutable, *task: Any) -> int:
    """Return the bytes of results in memory of an operand."""
    return memory_of(executable.tasks[Task(*task)].compiled).aliased


def test_sums_grow_where_they_are() -> None:
    assert aliased(compiled(), 0, "B") == WEIGHT


def test_an_inner_stage_leaves_the_gradient_of_its_input_where_something_was() -> None:
    """It reads its output's gradient and saved values last, and returns one such array and a sum."""
    for stage in (1, 2):
        assert aliased(compiled(), stage, "B") == WEIGHT + ACTIVATION


def test_an_update_uses_state_and_gradients_up() -> None:
    """New weights replace the old ones, or the gradient if the old ones belong to the caller."""
    assert aliased(compiled(donate=True), 1, "U") == WEIGHT
    assert aliased(compiled(donate=False), 1, "U") == WEIGHT
    step = compiled(donate=False)
    args = step.shard_args(stack_params(), stack_batch())
    step(*args)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args))


def test_what_a_forward_pass_keeps_is_not_used_up() -> None:
    """The backward pass reads activations again, and inputs belong to the caller."""
    assert all(
        aliased(compiled(), stage, "F") <= 4 for stage in range(4)
    )  # The last one sums the loss, a float.


def test_inference_keeps_nothing() -> None:
    """Every stage but the first, which reads an input, writes to its operand's memory."""
    method = pipeline(pipeline_schedule="inference", layer_option=autopar.ManualLayerOption())
    executable = autopar.parallelize(stack, method=method).get_executable(
        stack_params(), stack_batch()["x"]
    )
    assert isinstance(executable, LocalExecutable)
    assert [aliased(executable, stage, "F") for stage in range(4)] == [
        0,
        ACTIVATION,
        ACTIVATION,
        ACTIVATION,
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1"])
def test_what_is_used_up_is_freed_next(schedule: str) -> None:
    """Values that a task reads last are in the Free after each of its runs."""
    instructions = compiled(schedule).planned.instructions
    names = compiled(schedule).planned.names
    for row in instructions.program.instructions:
        freed: set[str] = set()
        for each in reversed(row):
            match each:
                case Free(values):
                    freed = set(values)
                case Run():
                    last = instructions.last_reads[task_of(each)]
                    assert {names.of(var, each.micro_batch) for var in last} <= freed
                    freed = set()
                case _:
                    pass
