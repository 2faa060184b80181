"""`stack_step`, a training step with a pipeline boundary between any two layers, and pipelines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.steps import assert_close_to_scale

WIDTH = 16


def stack_params(layers: int = 4, width: int = WIDTH) -> dict[str, Any]:
    """Return the weights of `stack`."""
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.normal(0, 0.3, (width, width)).astype(np.float32) for i in range(layers)}


def stack_batch(rows: int = 16, width: int = WIDTH) -> dict[str, np.ndarray]:
    """Return a batch of `stack_step`."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 1, (rows, width)).astype(np.float32) for name in ("x", "y")}


def stack(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Multiply by each layer's matrix, with a pipeline boundary between any two layers."""
    for i, name in enumerate(sorted(name for name in params if name.startswith("w"))):
        if i:
            autopar.mark_pipeline_boundary()
        x = jnp.tanh(x @ params[name])
    return x


def stack_loss(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    """Return the mean squared error of `stack`."""
    return jnp.mean((stack(params, batch["x"]) - batch["y"]) ** 2)


def stack_step(params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    """Take one step down the gradient of the mean squared error."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        return stack_loss(params, batch)

    return descend(params, autopar.value_and_grad(loss)(params))


def serial_stack(steps: int) -> tuple[Any, Any]:
    """Return the parameters and the last loss after `stack_step`s on one device."""
    params, loss, step = stack_params(), None, jax.jit(stack_step)
    for _ in range(steps):
        params, loss = step(params, stack_batch())
    return params, loss


def descend(params: Any, value_and_grad: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the updated parameters and the loss."""
    value, gradients = value_and_grad
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value


def pipeline(
    num_micro_batches: int = 4, devices: int | None = 4, **options: Any
) -> autopar.PipeshardParallel:
    """Return a pipeline with as many stages as layers."""
    return autopar.PipeshardParallel(devices, num_micro_batches, **options)


def assert_as_serial(
    step: Callable[..., Any], method: Any, *args: Any, steps: int = 2, rtol: float = 2e-5
) -> autopar.ParallelizedFunction:
    """Assert that training from `args` (state, batch, ...) in parallel equals one device.

    The step returns the new state, or a tuple that begins with it.
    """
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    serial = jax.jit(step)
    expected_state = actual_state = args[0]
    for _ in range(steps):
        expected, actual = serial(expected_state, *args[1:]), parallel(actual_state, *args[1:])
        assert_close_to_scale(actual, expected, rtol)
        expected_state, actual_state = (
            result[0] if isinstance(result, tuple) else result for result in (expected, actual)
        )
    return parallel
