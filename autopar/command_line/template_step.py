"""A training step that autopar plans as it is; replace the model, the loss and the sizes.

autopar plan my_step:make_step --cluster dgx_h100
"""

from typing import Any

import jax
import jax.numpy as jnp

import autopar

BATCH = 1024
WIDTH = 4096
LAYERS = 8
LEARNING_RATE = 1e-3

type Params = list[jax.Array]


def init(key: jax.Array) -> Params:
    """Return the parameters: a square kernel for each layer."""
    keys = jax.random.split(key, LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH), jnp.bfloat16) / WIDTH**0.5 for k in keys]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error of an MLP."""
    for kernel in params:
        x = jax.nn.relu(x @ kernel)
    return jnp.mean((x - y) ** 2)


def train_step(params: Params, batch: dict[str, jax.Array]) -> tuple[Params, jax.Array]:
    """Return the next parameters and the loss.

    `autopar.value_and_grad` is `jax.value_and_grad` whose gradients add up over microbatches.
    """
    value, gradients = autopar.value_and_grad(loss)(params, batch["x"], batch["y"])
    return [p - LEARNING_RATE * g for p, g in zip(params, gradients, strict=True)], value


def make_step() -> tuple[Any, Any]:
    """Return the step and its arguments. Shapes suffice: nothing is computed or allocated."""
    params = jax.eval_shape(init, jax.random.key(0))
    examples = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    return train_step, (params, {"x": examples, "y": examples})
