"""A vision transformer (Dosovitskiy et al., 2021)."""

from dataclasses import dataclass
from typing import Any, override

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import (
    Batch,
    Classification,
    ComputeDtype,
    ValueAndGrad,
    adam_state,
    cross_entropy_step,
)
from experiments.models.transformer import Block


class VisionTransformer(nn.Module):
    """Maps images (batch, height, width, 3) to float32 logits (batch, classes)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    patch_size: int
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch_size, self.patch_size)
        x = nn.Conv(self.hidden_size, patch, patch, "VALID", dtype=self.dtype, name="patches")(
            images
        )
        x = x.reshape(x.shape[0], -1, self.hidden_size)
        token = self.param("class", nn.initializers.zeros, (1, 1, self.hidden_size)).astype(
            self.dtype
        )
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.hidden_size)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(
            self.dtype
        )
        for i in range(self.num_layers):
            x = Block(self.num_heads, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x[:, 0])
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(jnp.float32)


@dataclass(frozen=True, slots=True)
class ViT(Classification):
    """A vision transformer for classification.

    Attributes:
        image_size: height and width; a multiple of `patch_size`.
        compute_dtype: as of `GPT`.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    patch_size: int
    image_size: int
    num_classes: int
    batch_size: int
    compute_dtype: ComputeDtype = "float32"

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        module = self.module(VisionTransformer)
        return adam_state(
            module.apply, module.init(key, jnp.zeros((1, self.image_size, self.image_size, 3)))
        )

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        return cross_entropy_step(state, batch["images"], batch["labels"], value_and_grad)
