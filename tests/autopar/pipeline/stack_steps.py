"""Small training steps for pipelines, and what one device makes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from experiments.models.model import Model

WIDTH = 16

# Adam divides a gradient by its own size, so that noise in a small one becomes a step; SGD shows gradients as they are.
SGD = optax.sgd(0.1)


def stack_params(layers: int = 4, width: int = WIDTH) -> dict[str, Any]:
    """Weights of `stack`."""
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.normal(0, 0.3, (width, width)).astype(np.float32) for i in range(layers)}


def stack_batch(rows: int = 16, width: int = WIDTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 1, (rows, width)).astype(np.float32) for name in ("x", "y")}


def stack(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """One matrix product per layer, and a boundary between any two."""
    for i, name in enumerate(sorted(name for name in params if name.startswith("w"))):
        if i:
            autopar.mark_pipeline_boundary()
        x = jnp.tanh(x @ params[name])
    return x


def stack_step(params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, jax.Array]:
    """Mean squared error, and one step down its gradient."""

    @autopar.manual_layer_construction
    def loss(params: Any) -> jax.Array:
        return jnp.mean((stack(params, batch["x"]) - batch["y"]) ** 2)

    return descend(params, autopar.value_and_grad(loss)(params))


def descend(params: Any, value_and_grad: tuple[Any, Any]) -> tuple[Any, Any]:
    value, gradients = value_and_grad
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value


def pipeline(
    num_micro_batches: int = 4, devices: int | None = 4, **options: Any
) -> autopar.PipeshardParallel:
    """A pipeline with as many stages as there are layers."""
    return autopar.PipeshardParallel(devices, num_micro_batches, **options)


def assert_as_serial(
    step: Callable[..., Any], method: Any, *args: Any, steps: int = 2, rtol: float = 2e-5
) -> autopar.ParallelizedFunction:
    """Assert that training from `args` (state, batch, ...) is the same in parallel as on one device.

    The step returns the new state, or a tuple that begins with it.
    """
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    serial = jax.jit(step)
    expected_state = actual_state = args[0]
    for _ in range(steps):
        expected, actual = serial(expected_state, *args[1:]), parallel(actual_state, *args[1:])
        for (path, one), other in zip(
            jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
        ):
            atol = rtol * max(1e-2, float(np.abs(np.asarray(one)).max(initial=0)))
            np.testing.assert_allclose(
                other, one, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
            )
        expected_state, actual_state = (
            r[0] if isinstance(r, tuple) else r for r in (expected, actual)
        )
    return parallel


def sgd_args(model: Model) -> tuple[Any, Any]:
    """A (state, batch) of a model, none of its parameters 0, where a mistake may not show."""
    random = np.random.default_rng(0)

    def parameter(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        positive = path[-1] in (jax.tree_util.DictKey("scale"), jax.tree_util.DictKey("var"))
        return random.normal(1.0 if positive else 0.0, 0.1, x.shape).astype(x.dtype)

    state, _ = model.abstract_args()
    params = jax.tree_util.tree_map_with_path(parameter, state.params)
    state = state.replace(step=np.int32(0), params=params, tx=SGD, opt_state=SGD.init(params))
    if hasattr(state, "batch_stats"):
        state = state.replace(
            batch_stats=jax.tree_util.tree_map_with_path(parameter, state.batch_stats)
        )
    return state, jax.jit(model.make_batch)(jax.random.key(0))
