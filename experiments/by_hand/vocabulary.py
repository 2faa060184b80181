"""Embedding and cross-entropy where each device along a mesh axis has some consecutive rows of the vocabulary (Shoeybi et al., 2019)."""

import jax
import jax.numpy as jnp

from autopar import manual


def lookup(table: jax.Array, tokens: jax.Array, axis: str) -> jax.Array:
    """This device's term of the embedding: rows of its part of `table`, 0 for tokens of others. The sum along `axis` is all of it."""
    mine, row = _own(table.shape[0], tokens, axis)
    return jnp.where(mine[..., None], table[row], 0)


def cross_entropy(logits: jax.Array, labels: jax.Array, axis: str) -> jax.Array:
    """The mean cross-entropy, without gathering the logits (..., part of the vocabulary). `labels` are the same along `axis`."""
    logits = logits.astype(jnp.float32)
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), axis)
    shifted = logits - top[..., None]
    mine, column = _own(logits.shape[-1], labels, axis)
    of_label = jnp.take_along_axis(shifted, column[..., None], axis=-1)[..., 0]
    of_label = manual.all_reduce(jnp.where(mine, of_label, 0), axis)
    return (jnp.log(manual.all_reduce(jnp.exp(shifted).sum(-1), axis)) - of_label).mean()


def _own(count: int, ids: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Whether each of `ids` is among the `count` of this device, and its place among them (any for others)."""
    place = ids - jax.lax.axis_index(axis) * count
    mine = (place >= 0) & (place < count)
    return mine, jnp.where(mine, place, 0)
