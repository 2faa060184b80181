"""What the planner says a device holds, beside what XLA:GPU lays out for the same plan."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.lower import compile_program
from autopar.trace import trace
from simulator.cluster import Cluster

A100 = Cluster.load("dgx_a100_80")


def estimated_and_compiled(step, args) -> tuple[float, float]:
    plan = autopar.plan_step(step, args, cluster=A100, mesh_shape=(8,), method=autopar.DataParallel())
    program, _ = compile_program(trace(step, args, (1,)), plan, A100, (0,))
    return plan.predicted_bytes, program.memory[0].total


def descent(loss):
    return lambda params, batch: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))


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
