"""A LLaMA-style decoder (Touvron et al., 2023).

It has RMS norms, rotary positions, gated feed-forward layers and grouped-query attention.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.models.model import ComputeDtype, NextToken
from experiments.models.transformer import attend


def rotate(x: jax.Array) -> jax.Array:
    """Rotate each pair of features by an angle that grows with the position (Su et al., 2021).

    Args:
        x: (batch, length, heads, features).
    """
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(length), 10000.0 ** -(jnp.arange(half) / half))[:, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


class GroupedAttention(nn.Module):
    """Causal grouped-query attention: several heads share a key and a value (Ainslie et al., 2023).

    Maps (batch, length, hidden) to the same shape.
    """

    num_heads: int
    num_kv_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        head_dim = hidden // self.num_heads

        def heads(name: str, count: int) -> jax.Array:
            y = nn.Dense(count * head_dim, use_bias=False, dtype=self.dtype, name=name)(x)
            return y.reshape(batch, length, count, head_dim)

        query, key = rotate(heads("query", self.num_heads)), rotate(heads("key", self.num_kv_heads))
        key, value = (
            jnp.repeat(x, self.num_heads // self.num_kv_heads, axis=2)
            for x in (key, heads("value", self.num_kv_heads))
        )
        mixed = attend(query, key, value, causal=True)
        return nn.Dense(hidden, use_bias=False, dtype=self.dtype, name="out")(
            mixed.reshape(batch, length, hidden)
        )


class GatedFeedForward(nn.Module):
    """A SwiGLU feed-forward layer (Shazeer, 2020)."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.silu(nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="gate")(x))
        up = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(gate * up)


class LlamaBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and with a skip connection."""

    num_heads: int
    num_kv_heads: int
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = GroupedAttention(
            self.num_heads, self.num_kv_heads, self.dtype, name="attention"
        )
        x = x + attention(nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x))
        feed_forward = GatedFeedForward(self.width, self.dtype, name="feed_forward")
        return x + feed_forward(nn.RMSNorm(dtype=self.dtype, name="feed_forward_norm")(x))


class LlamaDecoder(nn.Module):
    """Maps token ids (batch, length) to float32 logits (batch, length, vocabulary)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    width: int
    vocab_size: int
    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="tokens")(tokens)
        block = nn.remat(LlamaBlock) if self.remat else LlamaBlock
        for i in range(self.num_layers):
            x = block(self.num_heads, self.num_kv_heads, self.width, self.dtype, name=f"block_{i}")(
                x
            )
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")(x).astype(
            jnp.float32
        )


@dataclass(frozen=True, slots=True)
class Llama(NextToken):
    """LLaMA with next-token prediction.

    Attributes:
        num_kv_heads: number of keys and values, each shared by `num_heads / num_kv_heads` heads.
        width: width of the feed-forward layers.
        compute_dtype: dtype of activations and matrix products; parameters, softmax and loss are
            float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
    """

    network: ClassVar = LlamaDecoder
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    width: int
    sequence_length: int
    vocab_size: int
    batch_size: int
    compute_dtype: ComputeDtype = "float32"
    remat: bool = False
