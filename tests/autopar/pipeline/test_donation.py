"""Tasks donate operands at their last use, and results reuse their memory."""

import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
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
    stack_loss,
    stack_params,
    stack_step,
)
from tests.steps import assert_close_to_scale

ACTIVATION = 4 * WIDTH * 4  # bytes of the 4 rows of a microbatch
WEIGHT = WIDTH * WIDTH * 4


@cache
def compiled(schedule: str = "1f1b", donate: bool = True) -> LocalExecutable:
    method = pipeline(pipeline_schedule=schedule)
    parallel = autopar.parallelize(stack_step, method=method, donate_argnums=(0,) if donate else ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a donated operand that is not reused is a warning
        executable = parallel.get_executable(stack_params(), stack_batch())
    assert isinstance(executable, LocalExecutable)
    return executable


def aliased(executable: LocalExecutable, *task: Any) -> int:
    """Return the bytes of results in memory of an operand."""
    return memory_of(executable.tasks[Task(*task)].compiled).aliased


def test_a_gradient_sum_reuses_the_memory_of_its_operand() -> None:
    assert aliased(compiled(), 0, "B") == WEIGHT


def test_the_backward_pass_of_an_inner_stage_reuses_the_memory_of_an_activation() -> None:
    """It donates its output's gradient and saved values, and returns a gradient and a sum."""
    for stage in (1, 2):
        assert aliased(compiled(), stage, "B") == WEIGHT + ACTIVATION


def test_an_update_donates_state_or_gradients() -> None:
    """New weights reuse the old ones' memory, or the gradients' if the caller keeps the state."""
    assert aliased(compiled(donate=True), 1, "U") == WEIGHT
    assert aliased(compiled(donate=False), 1, "U") == WEIGHT
    step = compiled(donate=False)
    args = step.shard_args(stack_params(), stack_batch())
    step(*args)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args))


def test_a_forward_pass_does_not_donate_activations() -> None:
    """The backward pass reads activations again, and the caller keeps the inputs."""
    # the last stage adds to the sum of the loss, a float
    assert all(aliased(compiled(), stage, "F") <= 4 for stage in range(4))


def test_inference_donates_the_activations_of_every_stage() -> None:
    """The first stage reads an input, the last one writes into the rows of all microbatches."""
    method = pipeline(pipeline_schedule="inference", layer_option=autopar.ManualLayerOption())
    executable = autopar.parallelize(stack, method=method).get_executable(
        stack_params(), stack_batch()["x"]
    )
    assert isinstance(executable, LocalExecutable)
    assert [aliased(executable, stage, "F") for stage in range(4)] == [
        0,
        ACTIVATION,
        ACTIVATION,
        4 * ACTIVATION + 4,  # four microbatches, and their counter
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1"])
def test_donated_values_are_freed_after_the_task_that_donates_them(schedule: str) -> None:
    """The Free after each run of a task has the values that the task reads last."""
    instructions = compiled(schedule).planned.instructions
    names = compiled(schedule).planned.names
    inputs = compiled(schedule).planned.step.jaxpr.invars
    for row in instructions.program.instructions:
        freed: set[str] = set()
        for instruction in reversed(row):
            match instruction:
                case Free(values):
                    freed = set(values)
                case Run():
                    task = task_of(instruction)
                    last = instructions.last_reads[task].difference(inputs)
                    assert {names.of(var, instruction.micro_batch) for var in last} <= freed
                    freed = set()
                case _:
                    pass


def test_a_state_that_both_stages_of_a_mesh_read_is_donated_to_the_later_one() -> None:
    """Each stage counts up to scale its gradients, and the first one returns the counter."""

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            return stack_loss(params, batch)

        value, gradients = autopar.value_and_grad(loss)(state["params"])
        count = state["count"] + 1
        params = jax.tree.map(lambda p, g: p - 0.5 / count * g, state["params"], gradients)
        return {"params": params, "count": count}, value

    method = pipeline(devices=2, pipeline_schedule="interleaved_1f1b", num_chunks=2)
    parallel = autopar.parallelize(step, method=method, donate_argnums=0)
    actual = expected = {"params": stack_params(), "count": jnp.int32(0)}
    for _ in range(2):
        actual, _ = parallel(actual, stack_batch())
        expected, _ = jax.jit(step)(expected, stack_batch())
    assert_close_to_scale(actual, expected, 2e-5)


def test_parameters_that_the_step_returns_beside_their_update_are_not_donated() -> None:
    def step(state, batch):
        params, loss = stack_step(state["params"], batch)
        return {"params": params, "last": state["params"]}, loss

    def state() -> Any:
        return {"params": stack_params(), "last": stack_params()}

    parallel = autopar.parallelize(step, method=pipeline(), donate_argnums=0)
    expected = jax.jit(step)(state(), stack_batch())
    assert_close_to_scale(parallel(state(), stack_batch()), expected)
