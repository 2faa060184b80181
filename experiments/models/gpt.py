"""A GPT-2 style decoder (Radford et al., 2019)."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, Model, ValueAndGrad, adam_state


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        head_dim = hidden // self.num_heads
        qkv = nn.Dense(3 * hidden, dtype=self.dtype, name="qkv")(x)
        # Heads outside, query-key-value inside: columns of the projection can then be sharded by head.
        query, key, value = jnp.split(qkv.reshape(batch, length, self.num_heads, 3 * head_dim), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / head_dim**0.5
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.Dense(hidden, dtype=self.dtype, name="out")(mixed.reshape(batch, length, hidden))


class Block(nn.Module):
    """Attention, then a feed-forward layer of 4 x the width, each behind a layer norm and around a skip connection."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        x = x + Attention(self.num_heads, self.dtype, name="attention")(nn.LayerNorm(dtype=self.dtype)(x))
        y = nn.Dense(4 * hidden, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(hidden, dtype=self.dtype, name="down")(nn.gelu(y))


class Decoder(nn.Module):
    """Token ids (batch, length) in, logits (batch, length, vocabulary) out, in float32."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    dtype: Any
    remat: bool
    tied_head: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="tokens")
        positions = nn.Embed(self.sequence_length, self.hidden_size, dtype=self.dtype, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.num_layers):
            x = block(self.num_heads, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        head = nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")
        logits = embed.attend(x) if self.tied_head else head(x)
        return logits.astype(jnp.float32)


@dataclass(frozen=True, slots=True)
class GPT(Model):
    """Next-token prediction with cross-entropy.

    Attributes:
        compute_dtype: dtype of activations and matrix products; parameters, softmax and loss are float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
        tied_head: the token embedding is also the output projection.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    batch_size: int
    compute_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    remat: bool = False
    tied_head: bool = True

    @property
    def dtype(self) -> str:
        return self.compute_dtype

    def init_state(self, key: jax.Array) -> TrainState:
        module = Decoder(
            self.num_layers,
            self.hidden_size,
            self.num_heads,
            self.sequence_length,
            self.vocab_size,
            jnp.dtype(self.compute_dtype),
            self.remat,
            self.tied_head,
        )
        return adam_state(module.apply, module.init(key, jnp.zeros((1, self.sequence_length), jnp.int32)))

    def make_batch(self, key: jax.Array) -> Batch:
        tokens = jax.random.randint(key, (self.batch_size, self.sequence_length + 1), 0, self.vocab_size)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        def loss(params: nn.FrozenDict) -> jax.Array:
            logits = state.apply_fn(params, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
