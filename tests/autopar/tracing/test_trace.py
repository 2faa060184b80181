"""Traced steps name inputs and outputs by their paths; untraceable functions are refused."""

import jax
import jax.numpy as jnp
import pytest

from autopar.tracing.step_traces import TraceError
from autopar.tracing.trace import trace
from tests.steps import mlp_args, mlp_step


def test_inputs_and_outputs_have_the_users_names():
    step = trace(mlp_step, mlp_args(), (1,))
    assert "0/params/params/Dense_0/kernel" in step.in_paths
    assert "0/opt_state/0/mu/params/Dense_1/bias" in step.out_paths
    assert [step.in_paths[i] for i in sorted(step.batch)] == ["1/x", "1/y"]


def test_a_returned_state_is_carried_leaf_by_leaf():
    step = trace(mlp_step, mlp_args(), (1,))
    carried = {step.out_paths[o]: step.in_paths[i] for o, i in step.carried.items()}
    assert set(carried.values()) == {path for path in step.in_paths if path.startswith("0/")}
    assert all(out == source for out, source in carried.items())


def test_a_state_returned_alone_is_carried_too():
    step = trace(
        lambda params, batch: {"w": params["w"] * batch.sum()},
        ({"w": jnp.ones(3)}, jnp.ones(4)),
        (1,),
    )
    assert step.carried == {0: 0}


def test_a_traced_step_has_the_shapes_of_its_arguments():
    state, batch = mlp_args()
    step = trace(mlp_step, (state, batch), (1,))
    assert jax.tree.map(jnp.shape, step.in_avals) == jax.tree.map(jnp.shape, (state, batch))


def test_shapes_trace_to_the_same_step_as_arrays():
    args = mlp_args()
    shapes = jax.eval_shape(lambda *args: args, *args)
    assert trace(mlp_step, shapes, (1,)).fingerprint == trace(mlp_step, args, (1,)).fingerprint


def test_a_step_that_branches_on_a_value_is_refused():
    def step(state, batch):
        return state if batch.sum() > 0 else -state

    with pytest.raises(TraceError, match=r"step can't be traced(.|\n)*static_argnums"):
        trace(step, (jnp.ones(2), jnp.ones(2)), (1,))


def test_an_output_that_is_no_array_is_refused():
    with pytest.raises(TraceError, match="return only arrays"):
        trace(lambda x: {"a": x, "b": "text"}, (jnp.ones(2),), ())


def test_errors_of_the_step_itself_come_through():
    def step(x):
        raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        trace(step, (jnp.ones(2),), ())
