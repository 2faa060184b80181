"""Which arguments of a step are the batch, and steps whose batch is not their second argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.testing import assert_allclose
from autopar.tracing.arguments import batch_arguments
from tests.steps import serial

ROWS, IN, OUT = 16, 5, 3


def arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


MODEL = arrays((IN, 8), (8,), (8, OUT), (OUT,))
STATE = {"count": arrays(()), "mu": MODEL, "nu": MODEL}
[X] = arrays((ROWS, IN))
[Y] = arrays((ROWS,), dtype="int32")
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("args", "batch"),
    {
        "no arguments": ((), ()),
        "a single argument": ((X,), ()),
        "after the model": ((MODEL, {"x": X, "y": Y}), (1,)),
        "after the optimizer state": ((MODEL, STATE, X, Y), (2, 3)),
        "before the optimizer state": ((MODEL, X, Y, STATE), (1, 2)),
        "beside a random key": ((MODEL, STATE, KEY, X), (3,)),
        "beside a key of the old kind": ((MODEL, jax.random.PRNGKey(0), X, Y), (2, 3)),
        "with a key per example": ((MODEL, X, Y, jax.random.split(KEY, ROWS)), (1, 2, 3)),
        "beside other weights": ((MODEL, MODEL, STATE, X), (3,)),
        "beside weights of classes": ((MODEL, *arrays((OUT,)), X, Y), (2, 3)),
        "the moments of one matrix": ((arrays((4, 4)), arrays((4, 4), (4, 4)), X), (2,)),
        "arrays as large as the model's": ((MODEL, arrays((8, OUT), (8,))), (1,)),
        "beside numbers and functions": ((MODEL, 3, jnp.tanh, X, np.float32(1)), (3,)),
        "nodes and edges": ((MODEL, STATE, arrays((7, 2), (9, 2))), (2,)),
        "no examples": ((MODEL, KEY, 1.0), ()),
    }.values(),
)
def test_the_batch_is_found_by_its_shapes(args, batch):
    assert batch_arguments("auto", args, lambda: None) == batch


PRIORITIES = arrays((50,))
EMBEDDING = arrays((ROWS, IN))


@pytest.mark.parametrize(
    ("args", "returned", "batch"),
    {
        "beside other state": ((MODEL, *PRIORITIES, [X]), (0, 1), (2,)),
        "beside other state, nested": ((MODEL, *PRIORITIES, [X]), ({"a": 0}, [1]), (2,)),
        "before the state": (([X, Y], {"model": MODEL, "state": STATE}, 1.0), (1,), (0,)),
        "two arguments before the state": ((X, Y, {"model": MODEL, "state": STATE}), (2,), (0, 1)),
        "a model with as many rows": ((EMBEDDING, arrays((ROWS, 3)), Y), (0,), (1, 2)),
        "states of an environment": ((MODEL, STATE, KEY, X), (0, 1, 3), (3,)),
        "nodes and edges": ((MODEL, STATE, arrays((7, 2), (9, 2))), (0, 1), (2,)),
        "an evaluation of a model with as many rows": ((EMBEDDING, [X], Y), (), (1, 2)),
        "a prediction for examples": ((arrays((ROWS, IN), (ROWS, 3)), X), (1,), (1,)),
        "a prediction beside a key": ((MODEL, X, jax.random.PRNGKey(0)), (1,), (1,)),
    }.values(),
)
def test_what_a_step_returns_decides_where_shapes_do_not(args, returned, batch):
    def result() -> Any:
        return jax.tree.map(lambda i: args[i], returned), jax.ShapeDtypeStruct((), "float32")

    assert batch_arguments("auto", args, result) == batch


def step(params: Any, state: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        hidden = jax.nn.relu(x @ params["in"])
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], y)
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = optax.adam(1e-2).update(grads, state)
    return optax.apply_updates(params, updates), state, loss


def values() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in {"in": (IN, 8), "out": (8, OUT)}.items()
    }
    x = jnp.asarray(rng.normal(size=(ROWS, IN)), jnp.float32)
    return params, optax.adam(1e-2).init(params), x, jnp.asarray(rng.integers(0, OUT, ROWS))


@pytest.mark.parametrize(
    "method",
    [
        autopar.DataParallel(4),
        autopar.Zero3Parallel(4),
        autopar.ShardParallel(4, num_micro_batches=2),
        autopar.PipeshardParallel(4, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)),
    ],
    ids=["data", "zero3", "microbatches", "pipeline"],
)
def test_a_step_with_its_optimizer_state_before_the_batch_equals_one_device(method):
    parallel = autopar.parallelize(step, method=method)
    assert_allclose(parallel(*values()), serial(step, *values()), rtol=2e-3, atol=2e-3)
    assert {path for path, role in roles(parallel).items() if role == "batch"} == {"2", "3"}


def roles(parallel: Any) -> dict[str, str]:
    plan = parallel.get_last_executable().plan
    return {entry.path: entry.role for stage in plan.stages for entry in stage.inputs}


def test_data_parallelism_splits_the_examples_and_copies_the_optimizer_state():
    parallel = autopar.parallelize(step, method=autopar.DataParallel(4))
    parallel(*values())
    [stage] = parallel.get_last_executable().plan.stages
    split = {value.path for value in stage.inputs if any(value.spec)}
    assert split == {"2", "3"}


def prioritized_step(batch: Any, state: Any, priorities: Any) -> Any:
    params, opt_state = state
    params, opt_state, loss = step(params, opt_state, batch["x"], batch["y"])
    errors = jnp.abs(batch["x"] @ params["in"]).sum(1)
    return (params, opt_state), priorities.at[batch["rows"]].set(errors), loss


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel(4, num_micro_batches=2),
        autopar.PipeshardParallel(4, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)),
    ],
    ids=["microbatches", "pipeline"],
)
def test_a_step_with_its_batch_before_several_states_equals_one_device(method):
    params, opt_state, x, y = values()
    batch = {"x": x, "y": y, "rows": jnp.arange(ROWS) * 3}
    args = batch, (params, opt_state), jnp.zeros(50)
    parallel = autopar.parallelize(prioritized_step, method=method)
    assert_allclose(parallel(*args), serial(prioritized_step, *args), rtol=2e-3, atol=2e-3)


def test_a_step_without_a_batch_is_not_cut_into_microbatches():
    parallel = autopar.parallelize(
        lambda params: jax.grad(lambda p: (p**2).sum())(params),
        method=autopar.ShardParallel(1, num_micro_batches=2),
    )
    with pytest.raises(autopar.MicrobatchError, match="no argument of <lambda> is a batch"):
        parallel(jnp.ones(4))


def test_the_optimizer_of_an_nnx_model_is_not_its_batch():
    model = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @autopar.parallelize(method=autopar.ShardParallel(4, num_micro_batches=2))
    def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return ((model(x) - y[:, None]) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    *_, x, y = values()
    loss = train_step(model, optimizer, x, y)
    expected = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(loss, ((expected(x) - y[:, None]) ** 2).mean(), rtol=1e-5)
