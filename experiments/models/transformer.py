"""The transformer block that several models are made of."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def attend(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """The core of attention, written out; all of (batch, length, heads, features), softmax in float32."""
    length = query.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if causal:
        visible = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class SelfAttention(nn.Module):
    """One projection for queries, keys and values. (batch, length, hidden) to the same.

    Attributes:
        causal: a position attends to itself and those before it, not to every other.
    """

    num_heads: int
    dtype: Any
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        head_dim = hidden // self.num_heads
        qkv = nn.Dense(3 * hidden, dtype=self.dtype, name="qkv")(x)
        # Heads outside, query-key-value inside: columns of the projection can then be sharded by head.
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
    """Attention and a feed-forward layer around skip connections, normalised before each (as GPT) or after the sum (as BERT)."""

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
