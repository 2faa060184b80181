"""What the planner says a device holds, beside what XLA:GPU lays out for the same plan."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.plan import Plan
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse

A100 = Cluster.load("dgx_a100_80")


def planned_and_compiled(step, args) -> tuple[Plan, MemoryUse]:
    plan = autopar.plan_step(
        step, args, cluster=A100, mesh_shape=(8,), method=autopar.DataParallel()
    )
    program = autopar.compile_step(step, args, plan, A100, donate_argnums=(0,))
    return plan, program.memory[0]


def estimated_and_compiled(step, args) -> tuple[float, float]:
    plan, memory = planned_and_compiled(step, args)
    return plan.predicted_bytes, memory.total


def descent(loss):
    return lambda params, batch: jax.tree.map(
        lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch)
    )


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.exp])
def test_residuals_of_a_layer_are_counted(activation):
    def loss(params, x):
        for w in params:
            x = activation(x @ w)
        return (x**2).mean()

    array = jax.ShapeDtypeStruct
    estimate, compiled = estimated_and_compiled(
        descent(loss), ([array((256, 256), "float32")] * 3, array((524288, 256), "float32"))
    )
    assert 0.97 * compiled <= estimate <= 1.15 * compiled


def test_a_loop_over_layers_holds_all_their_residuals():
    def loss(params, x):
        y, _ = lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, params)
        return (y**2).mean()

    array = jax.ShapeDtypeStruct
    estimate, compiled = estimated_and_compiled(
        descent(loss), (array((6, 256, 256), "float32"), array((524288, 256), "float32"))
    )
    assert 0.97 * compiled <= estimate <= 1.25 * compiled


def test_gradients_that_wait_to_be_reduce_scattered_are_gradients():
    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    array, layers, width = jax.ShapeDtypeStruct, 4, 1024
    args = [array((width, width), "float32")] * layers, array((8 * 16, width), "float32")
    plan = autopar.plan_step(
        descent(loss), args, cluster=A100, mesh_shape=(8,), method=autopar.Zero3Parallel()
    )
    roles = plan.predicted_memory.model_dump()
    one = 4 * 16 * width  # what a layer gives, on one device
    assert roles["activations"] <= 2 * layers * one
    assert roles["gradients"] >= 4 * width**2  # one at least is whole
    assert sum(roles.values()) == plan.predicted_bytes


def test_memory_is_for_the_same_in_a_plan_and_in_the_program():
    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    array, layers, tokens = jax.ShapeDtypeStruct, 6, 524288 // 8
    args = [array((256, 256), "float32")] * layers, array((524288, 256), "float32")
    plan, memory = planned_and_compiled(descent(loss), args)
    planned = plan.predicted_memory.model_dump()
    assert sum(planned.values()) == plan.predicted_bytes
    one = 4 * 256 * tokens  # what a layer gives, on one device
    for roles in (planned, memory.roles):
        assert (roles["parameters"], roles["inputs"]) == (4 * 256 * 256 * layers, one)
        # of each layer but the last the product and what relu makes of it; then the gradients come, one or two at a time
        assert 2 * (layers - 1) * one <= roles["activations"] <= 2 * layers * one * 1.01
        assert one * 0.99 <= roles["temporaries"] <= 2.1 * one
