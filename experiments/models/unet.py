"""A U-Net (Ronneberger et al., 2015) that predicts the noise of images, as in diffusion models.

The objective is that of Ho et al., 2020.
"""

from dataclasses import dataclass
from typing import override

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Model, ValueAndGrad, adam_state


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions after group norms, with a skip connection and a noise level."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.channels)(level)[:, None, None, :]
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(y)))
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), name="skip")(x)
        return x + y


class UNetModule(nn.Module):
    """Maps images (batch, height, width, colours) and noise levels (batch,) to the noise."""

    channels: int
    depth: int

    @nn.compact
    def __call__(self, images: jax.Array, level: jax.Array) -> jax.Array:
        angles = level[:, None] * 10 ** jnp.linspace(0, 3, self.channels // 2)
        condition = nn.silu(
            nn.Dense(4 * self.channels)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        )
        x = nn.Conv(self.channels, (3, 3))(images)
        skips = []
        for i in range(self.depth):
            x = ResidualBlock(self.channels * 2**i, name=f"down_{i}")(x, condition)
            skips.append(x)
            x = nn.Conv(self.channels * 2**i, (3, 3), 2)(x)
        x = ResidualBlock(self.channels * 2**self.depth, name="middle")(x, condition)
        for i in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.channels * 2**i, (2, 2), (2, 2))(x)
            x = ResidualBlock(self.channels * 2**i, name=f"up_{i}")(
                jnp.concatenate([x, skips.pop()], -1), condition
            )
        return nn.Conv(images.shape[-1], (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


@dataclass(frozen=True, slots=True)
class UNet(Model):
    """A U-Net with the mean squared error of the predicted noise, in float32.

    Attributes:
        channels: channels at full resolution; a multiple of 8.
        depth: how often the resolution is halved.
        image_size: height and width; a multiple of 2 ** `depth`.
    """

    channels: int
    depth: int
    image_size: int
    batch_size: int

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        module = UNetModule(self.channels, self.depth)
        images = jnp.zeros((1, self.image_size, self.image_size, 3))
        return adam_state(module.apply, module.init(key, images, jnp.zeros(1)))

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        pixels, noise, levels = jax.random.split(key, 3)
        shape = (self.batch_size, self.image_size, self.image_size, 3)
        return {
            "images": jax.random.normal(pixels, shape),
            "noise": jax.random.normal(noise, shape),
            "level": jax.random.uniform(levels, (self.batch_size,)),
        }

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        level = batch["level"][:, None, None, None]
        noisy = jnp.sqrt(1 - level) * batch["images"] + jnp.sqrt(level) * batch["noise"]

        def loss(params: nn.FrozenDict) -> jax.Array:
            return jnp.mean((state.apply_fn(params, noisy, batch["level"]) - batch["noise"]) ** 2)

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
