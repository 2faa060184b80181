"""A Wide-ResNet (Zagoruyko and Komodakis, 2016) with batch normalization."""

from dataclasses import dataclass
from functools import partial
from typing import Any, override

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Classification, ValueAndGrad

BLOCKS = {8: (1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Bottleneck blocks in each group, by number of layers (8 is for tests)."""


class NormState(TrainState):
    """A train state with the running means and variances of batch normalization."""

    batch_stats: Any


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a skip connection.

    The 3 x 3 convolution has `width` x `channels`, the result 4 x `channels`.
    """

    channels: int
    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels * self.width, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_skip")(
                conv(4 * self.channels, (1, 1), self.strides, name="skip")(x)
            )
        return nn.relu(x + y)


class WideResNetModule(nn.Module):
    """Maps images (batch, height, width, 3) to logits (batch, classes)."""

    num_layers: int
    channels: int
    width: int
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.channels, (7, 7), 2, use_bias=False, name="stem")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for group, count in enumerate(BLOCKS[self.num_layers]):
            for i in range(count):
                strides = 2 if group and not i else 1
                block = Bottleneck(
                    self.channels * 2**group, self.width, strides, name=f"block_{group}_{i}"
                )
                x = block(x)
        return nn.Dense(self.num_classes, name="head")(x.mean((1, 2)))


@dataclass(frozen=True, slots=True)
class WideResNet(Classification):
    """A Wide-ResNet for classification, in float32.

    Attributes:
        num_layers: one of `BLOCKS`.
        channels: channels of the stem.
        width: factor by which 3 x 3 convolutions have more channels.
    """

    num_layers: int
    channels: int
    width: int
    image_size: int
    num_classes: int
    batch_size: int

    @override
    def init_state(self, key: jax.Array) -> NormState:
        module = WideResNetModule(self.num_layers, self.channels, self.width, self.num_classes)
        variables = module.init(key, jnp.zeros((1, self.image_size, self.image_size, 3)))
        apply = partial(module.apply, mutable=["batch_stats"])
        state = NormState.create(
            apply_fn=apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=optax.adam(1e-3),
        )
        return state.replace(step=jnp.zeros((), jnp.int32))  # see `train_state`

    @override
    def train_step(
        self, state: Any, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[NormState, jax.Array]:
        def loss(params: nn.FrozenDict) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, batch["images"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), updated["batch_stats"]

        (value, batch_stats), grads = value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), value
