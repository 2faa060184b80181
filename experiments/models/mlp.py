"""The MLP of Alpa's quickstart."""

from dataclasses import dataclass
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, ComputeDtype, Model, ValueAndGrad, adam_state


class MLPModule(nn.Module):
    """Dense layers of widths 4 x `hidden_dim` and `hidden_dim` in turn, each with a relu."""

    hidden_dim: int
    num_layers: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.num_layers):
            features = self.hidden_dim * 4 if i % 2 == 0 else self.hidden_dim
            x = nn.relu(nn.Dense(features, dtype=self.dtype)(x))
        return x


@dataclass(frozen=True, slots=True)
class MLP(Model):
    """An MLP that learns y = W x + b.

    Attributes:
        dim: width of x and y.
        compute_dtype: as of `GPT`.
    """

    dim: int
    num_layers: int
    batch_size: int
    compute_dtype: ComputeDtype = "float32"

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        module = MLPModule(self.dim, self.num_layers, jnp.dtype(self.compute_dtype))
        params = module.init(key, jnp.zeros((1, self.dim)))
        return adam_state(module.apply, params)

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        weights, bias, inputs, noise = jax.random.split(key, 4)
        x = jax.random.normal(inputs, (self.batch_size, self.dim))
        y = x @ jax.random.normal(weights, (self.dim, self.dim)) + jax.random.normal(
            bias, (self.dim,)
        )
        return {"x": x, "y": y + 0.1 * jax.random.normal(noise, y.shape)}

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> TrainState:
        def loss(params: nn.FrozenDict) -> jax.Array:
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        _, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads)
