"""Layers with dropout, whose random bits a recomputation has to repeat."""

import jax
import jax.numpy as jnp


def loss(params, batch, key):
    x = batch["x"]
    for layer, weight in enumerate(params):
        x = jnp.tanh(x @ weight)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, layer), 0.8, x.shape), x, 0)
    return jnp.mean((x - batch["y"]) ** 2)


def layers_and_batch(depth, width, rows):
    """Return random weights of the layers, a batch, and the key of dropout."""
    keys = jax.random.split(jax.random.key(0), depth + 2)
    params = [jax.random.normal(key, (width, width)) / 4 for key in keys[:depth]]
    batch = {
        name: jax.random.normal(key, (rows, width))
        for name, key in zip("xy", keys[depth:], strict=True)
    }
    return params, batch, jax.random.key(1)
