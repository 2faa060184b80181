"""The transformer block that several models share."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def attend(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """Apply scaled dot-product attention, with the softmax in float32.

    Args:
        query: (batch, length, heads, features), like `key`, `value` and the result.
        key: keys.
        value: values.
        causal: whether a position attends only to itself and those before it.
    """
    length = query.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if causal:
        visible = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class SelfAttention(nn.Module):
    """Multi-head attention with one projection for queries, keys and values.

    Maps (batch, length, hidden) to the same shape.
    """

    num_heads: int
    dtype: Any
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        head_dim = hidden // self.num_heads
        qkv = nn.Dense(3 * hidden, dtype=self.dtype, name="qkv")(x)
        # Columns are ordered by head, then query, key, value, so that they can be sharded by head.
        query, key, value = jnp.split(
            qkv.reshape(batch, length, self.num_heads, 3 * head_dim), 3, axis=-1
        )
        mixed = attend(query, key, value, self.causal)
        return nn.Dense(hidden, dtype=self.dtype, name="out")(mixed.reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """Two dense layers, `widening` x as wide in between."""

    dtype: Any
    widening: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.widening * x.shape[-1], dtype=self.dtype, name="up")(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(y)


class Block(nn.Module):
    """Attention and a feed-forward layer with skip connections.

    Attributes:
        norm_first: normalize before each layer, as GPT does, not after the sum, as BERT does.
    """

    num_heads: int
    dtype: Any
    norm_first: bool = True
    widening: int = 4
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = SelfAttention(self.num_heads, self.dtype, self.causal, name="attention")
        feed_forward = FeedForward(self.dtype, self.widening, name="feed_forward")
        norms = nn.LayerNorm(dtype=self.dtype), nn.LayerNorm(dtype=self.dtype)
        for norm, layer in zip(norms, (attention, feed_forward), strict=True):
            x = x + layer(norm(x)) if self.norm_first else norm(x + layer(x))
        return x
