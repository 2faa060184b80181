"""A small training step that many tests share, and its results on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar


class MLP(nn.Module):
    """Dense layers of the given sizes, with relu in between."""

    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, size in enumerate(self.sizes):
            x = nn.Dense(size)(x if i == 0 else nn.relu(x))
        return x


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


@cache
def _jitted(step: Callable[..., Any]) -> Any:
    return jax.jit(step)


def serial(step: Callable[..., Any], *args: Any) -> Any:
    """Return the results of the step on one device."""
    return _jitted(step)(*args)


_ADAM = optax.adam(1e-2)
