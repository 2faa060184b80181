"""Training steps and arguments that tests share, and comparisons with one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar
from experiments.models.model import Model
from tests.models import MLP


def mlp_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    """Minimize the mean squared error; gradients accumulate over microbatches if there are any."""

    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    value, gradients = autopar.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def mlp_args(
    sizes: tuple[int, ...] = (64, 64), batch_size: int = 16, features: int = 32, tx: Any = None
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Return a train state and a batch for `mlp_step`."""
    model = MLP(sizes)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((batch_size, features), np.float32),
        "y": rng.standard_normal((batch_size, sizes[-1]), np.float32),
    }
    params = model.init(jax.random.PRNGKey(0), batch["x"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or _ADAM), batch


# Adam divides a gradient by its own size, which turns the noise of a small one into a step. SGD
# shows gradients as they are.
SGD = optax.sgd(0.1)


def sgd_args(model: Model, tx: optax.GradientTransformation = SGD) -> tuple[Any, Any]:
    """Return a (state, batch) of a model; no parameter is 0, where a mistake might not show."""
    random = np.random.default_rng(0)

    def parameter(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        positive = path[-1] in (jax.tree_util.DictKey("scale"), jax.tree_util.DictKey("var"))
        return random.normal(1.0 if positive else 0.0, 0.1, x.shape).astype(x.dtype)

    state, _ = model.abstract_args()
    params = jax.tree_util.tree_map_with_path(parameter, state.params)
    state = state.replace(step=np.int32(0), params=params, tx=tx, opt_state=tx.init(params))
    if hasattr(state, "batch_stats"):
        batch_stats = jax.tree_util.tree_map_with_path(parameter, state.batch_stats)
        state = state.replace(batch_stats=batch_stats)
    return state, jax.jit(model.make_batch)(jax.random.key(0))


def model_step(model: Model) -> Callable[..., Any]:
    """Return the training step of a model; gradients accumulate over microbatches if any."""

    def step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch, autopar.value_and_grad)

    return step


def assert_close_to_scale(actual: Any, expected: Any, rtol: float = 1e-4) -> None:
    """Assert that pytrees are close, up to `rtol` times each leaf's largest value.

    `autopar.testing.assert_allclose` has one absolute tolerance for all leaves.
    """
    for (path, one), other in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        atol = rtol * max(1e-2, float(np.abs(np.asarray(one)).max(initial=0)))
        np.testing.assert_allclose(
            other, one, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


@cache
def _jitted(step: Callable[..., Any]) -> Any:
    return jax.jit(step)


def serial(step: Callable[..., Any], *args: Any) -> Any:
    """Return the results of the step on one device."""
    return _jitted(step)(*args)


_ADAM = optax.adam(1e-2)
