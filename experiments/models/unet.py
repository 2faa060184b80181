"""A U-Net (Ronneberger et al., 2015) that removes noise from images, as diffusion models train it (Ho et al., 2020)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Model, ValueAndGrad, adam_state


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions behind group norms, told the noise level in between, around a skip connection."""

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
    """Images (batch, height, width, colours) and noise levels (batch,) in, the noise out."""

    channels: int
    depth: int

    @nn.compact
    def __call__(self, images: jax.Array, level: jax.Array) -> jax.Array:
        angles = level[:, None] * 10 ** jnp.linspace(0, 3, self.channels // 2)
        told = nn.silu(
            nn.Dense(4 * self.channels)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        )
        x = nn.Conv(self.channels, (3, 3))(images)
        kept = []
        for i in range(self.depth):
            x = ResidualBlock(self.channels * 2**i, name=f"down_{i}")(x, told)
            kept.append(x)
            x = nn.Conv(self.channels * 2**i, (3, 3), 2)(x)
        x = ResidualBlock(self.channels * 2**self.depth, name="middle")(x, told)
        for i in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.channels * 2**i, (2, 2), (2, 2))(x)
            x = ResidualBlock(self.channels * 2**i, name=f"up_{i}")(
                jnp.concatenate([x, kept.pop()], -1), told
            )
        return nn.Conv(images.shape[-1], (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


@dataclass(frozen=True, slots=True)
class UNet(Model):
    """Mean squared error of the predicted noise, in float32. `image_size` is a multiple of 2 ** `depth`, `channels` of 8."""

    channels: int
    depth: int
    image_size: int
    batch_size: int

    def init_state(self, key: jax.Array) -> TrainState:
        module = UNetModule(self.channels, self.depth)
        images = jnp.zeros((1, self.image_size, self.image_size, 3))
        return adam_state(module.apply, module.init(key, images, jnp.zeros(1)))

    def make_batch(self, key: jax.Array) -> Batch:
        pixels, noise, levels = jax.random.split(key, 3)
        shape = (self.batch_size, self.image_size, self.image_size, 3)
        return {
            "images": jax.random.normal(pixels, shape),
            "noise": jax.random.normal(noise, shape),
            "level": jax.random.uniform(levels, (self.batch_size,)),
        }

    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        level = batch["level"][:, None, None, None]
        noisy = jnp.sqrt(1 - level) * batch["images"] + jnp.sqrt(level) * batch["noise"]

        def loss(params: nn.FrozenDict) -> jax.Array:
            return jnp.mean((state.apply_fn(params, noisy, batch["level"]) - batch["noise"]) ** 2)

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
