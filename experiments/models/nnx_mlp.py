"""An MLP in flax's nnx, whose modules own their parameters."""

from dataclasses import dataclass
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Model, ValueAndGrad, adam_state


class NnxBlock(nnx.Module):
    """A residual block: a norm and two dense layers, 4 x `dim` wide in between."""

    def __init__(self, dim: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


@dataclass(frozen=True, slots=True)
class NnxMLP(Model):
    """An MLP of nnx modules that learns y = tanh(x) in float32; `dim` is the width of x and y."""

    dim: int
    num_layers: int
    batch_size: int

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        rngs = nnx.Rngs(key)
        graph, params = nnx.split(
            nnx.Sequential(*(NnxBlock(self.dim, rngs) for _ in range(self.num_layers))), nnx.Param
        )

        def apply(params: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graph, params)(x)

        return adam_state(apply, params)

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        x = jax.random.normal(key, (self.batch_size, self.dim))
        return {"x": x, "y": jnp.tanh(x)}

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
