"""`shared_traces`: the same step is traced once, and nothing else is shared."""

import jax
import jax.numpy as jnp
import pytest

import autopar

SHAPES = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)


@pytest.fixture
def counted():
    """Return a step, and a list that grows by the batch's shape whenever the step is traced."""
    traces = []

    def step(weight, batch):
        traces.append(batch.shape)
        gradient = autopar.grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
        return weight - 0.1 * gradient

    return step, traces


def plan_and_predict(step, args):
    plan = autopar.plan_step(step, args, cluster="dgx_h100")
    return plan, autopar.predict(step, args, plan, "dgx_h100", fidelity="analytic").seconds


def test_planning_and_predicting_share_a_trace_inside_a_block_only(counted):
    step, traces = counted
    with autopar.shared_traces():
        _, inside = plan_and_predict(step, SHAPES)
        assert len(traces) == 1
    _, outside = plan_and_predict(step, SHAPES)
    assert len(traces) == 3
    assert inside == outside


def test_other_shapes_and_functions_are_traced_anew(counted):
    step, traces = counted
    larger = SHAPES[0], jax.ShapeDtypeStruct((32, 8), jnp.float32)
    with autopar.shared_traces():
        plan_and_predict(step, SHAPES)
        plan_and_predict(step, larger)
        assert traces == [(16, 8), (32, 8)]
        other = autopar.plan_step(lambda w, x: step(w, x), larger, cluster="dgx_h100")
        assert traces[2:] == [(32, 8)]
    assert other.step == "<lambda>"
