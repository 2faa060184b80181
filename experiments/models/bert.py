"""A BERT encoder (Devlin et al., 2019), trained to predict masked tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, ComputeDtype, TokenModel, ValueAndGrad
from experiments.models.transformer import Block

MASK = 0
"""The token that replaces a masked one."""


class Encoder(nn.Module):
    """Maps token ids (batch, length) to float32 logits (batch, length, vocabulary)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="tokens")
        positions = nn.Embed(
            self.sequence_length, self.hidden_size, dtype=self.dtype, name="positions"
        )
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(
            embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        )
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.num_layers):
            x = block(self.num_heads, self.dtype, norm_first=False, name=f"block_{i}")(x)
        x = nn.gelu(nn.Dense(self.hidden_size, dtype=self.dtype, name="transform")(x))
        x = nn.LayerNorm(dtype=self.dtype, name="head_norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        return embed.attend(x).astype(jnp.float32) + bias


@dataclass(frozen=True, slots=True)
class BERT(TokenModel):
    """BERT with the cross-entropy of masked tokens, 15 % of all.

    Attributes:
        compute_dtype: dtype of activations and matrix products; parameters, softmax and loss are
            float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
    """

    network: ClassVar = Encoder
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    batch_size: int
    compute_dtype: ComputeDtype = "float32"
    remat: bool = False

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        words, hidden = jax.random.split(key)
        labels = jax.random.randint(
            words, (self.batch_size, self.sequence_length), 1, self.vocab_size
        )
        masked = jax.random.uniform(hidden, labels.shape) < 0.15
        return {"tokens": jnp.where(masked, MASK, labels), "labels": labels, "masked": masked}

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        def loss(params: nn.FrozenDict) -> jax.Array:
            logits = state.apply_fn(params, batch["tokens"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return jnp.where(batch["masked"], losses, 0).sum() / batch["masked"].sum()

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
