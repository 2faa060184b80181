"""Embedding and cross-entropy with the vocabulary split over a mesh axis (Shoeybi et al., 2019)."""

import jax
import jax.numpy as jnp

from autopar import manual


def lookup(table: jax.Array, tokens: jax.Array, axis: str) -> jax.Array:
    """Return this device's term of the embedding; the embedding is their sum along `axis`.

    Args:
        table: this device's rows of the embedding, (part of the vocabulary, features).
        tokens: token ids of the whole vocabulary; those outside the part give 0.
        axis: the mesh axis that the vocabulary is split over.
    """
    mine, row = _own(table.shape[0], tokens, axis)
    return jnp.where(mine[..., None], table[row], 0)


def cross_entropy(logits: jax.Array, labels: jax.Array, axis: str) -> jax.Array:
    """Return the mean cross-entropy, without gathering the logits.

    Args:
        logits: (..., part of the vocabulary).
        labels: token ids of the whole vocabulary, the same along `axis`.
        axis: the mesh axis that the vocabulary is split over.
    """
    logits = logits.astype(jnp.float32)
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), axis)
    shifted = logits - top[..., None]
    mine, column = _own(logits.shape[-1], labels, axis)
    label_logit = jnp.take_along_axis(shifted, column[..., None], axis=-1)[..., 0]
    label_logit = manual.all_reduce(jnp.where(mine, label_logit, 0), axis)
    return (jnp.log(manual.all_reduce(jnp.exp(shifted).sum(-1), axis)) - label_logit).mean()


def _own(count: int, ids: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return which ids are among the `count` of this device, and their places (0 for others)."""
    place = ids - jax.lax.axis_index(axis) * count
    mine = (place >= 0) & (place < count)
    return mine, jnp.where(mine, place, 0)
