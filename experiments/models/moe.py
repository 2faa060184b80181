"""A transformer with mixtures of experts (GShard, Lepikhin et al., 2020).

Every second feed-forward layer is a mixture of experts.
"""

from dataclasses import dataclass
from typing import Any, Literal, override

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.models.model import Batch, ComputeDtype, Model, ValueAndGrad, train_state
from experiments.models.transformer import Block, SelfAttention


def top2_gating(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Dispatch each token to two experts (GShard, algorithm 1, without the random drop).

    Args:
        gates: probabilities (group, token, expert).
        capacity: tokens of a group that an expert takes; later tokens are dropped.

    Returns:
        Weights (group, token, expert, place) that combine the outputs of experts, 0 where a token
        is not dispatched; and the auxiliary loss that balances the load of experts.
    """
    first = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1])
    second = jax.nn.one_hot((gates * (1 - first)).argmax(-1), gates.shape[-1])
    balance = (gates.mean(1) * first.mean(1)).sum(-1).mean() * gates.shape[-1]
    places = jnp.cumsum(first, 1) - 1, jnp.cumsum(second, 1) - 1 + first.sum(1, keepdims=True)
    shares = (gates * first).sum(-1), (gates * second).sum(-1)
    total = shares[0] + shares[1] + 1e-9
    combine = jnp.zeros((*gates.shape, capacity))
    for chosen, place, share in zip((first, second), places, shares, strict=True):
        position = (place * chosen).sum(-1).astype(jnp.int32)
        slot = jax.nn.one_hot(position, capacity)  # all zeros beyond the capacity
        combine += (share / total)[..., None, None] * chosen[..., None] * slot[..., None, :]
    return combine, balance


class Experts(nn.Module):
    """A feed-forward layer for each expert, `widening` x as wide in between.

    Tokens are dispatched within groups. Maps (batch, length, hidden) to the same shape and the
    balance loss.
    """

    num_experts: int
    group_size: int
    widening: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = x.shape[-1]
        tokens = x.reshape(-1, self.group_size, hidden)
        gates = nn.Dense(self.num_experts, use_bias=False, dtype=jnp.float32, name="gate")(tokens)
        capacity = max(1, 2 * self.group_size // self.num_experts)
        combine, balance = top2_gating(jax.nn.softmax(gates), capacity)
        initializer = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param(
            "up", initializer, (self.num_experts, hidden, self.widening * hidden)
        ).astype(self.dtype)
        down = self.param(
            "down", initializer, (self.num_experts, self.widening * hidden, hidden)
        ).astype(self.dtype)
        dispatched = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(self.dtype), tokens)
        inner = nn.gelu(jnp.einsum("egcm,emh->egch", dispatched, up))
        done = jnp.einsum("egch,ehm->egcm", inner, down)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(self.dtype), done).reshape(
            x.shape
        ), balance


class ExpertBlock(nn.Module):
    """An encoder block with experts as its feed-forward layer; also returns their balance loss."""

    num_heads: int
    num_experts: int
    group_size: int
    widening: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + SelfAttention(self.num_heads, self.dtype, name="attention")(
            nn.LayerNorm(dtype=self.dtype)(x)
        )
        experts = Experts(
            self.num_experts, self.group_size, self.widening, self.dtype, name="experts"
        )
        y, balance = experts(nn.LayerNorm(dtype=self.dtype)(x))
        return x + y, balance


class MoEModule(nn.Module):
    """Maps token ids (batch, length) to float32 logits (batch, length, vocabulary) and a loss.

    The loss is the balance loss of all experts.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_experts: int
    group_size: int
    sequence_length: int
    vocab_size: int
    widening: int
    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        embed = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="tokens")
        positions = nn.Embed(
            self.sequence_length, self.hidden_size, dtype=self.dtype, name="positions"
        )
        x, balance = embed(tokens) + positions(jnp.arange(tokens.shape[1])), jnp.float32(0)
        dense, expert = (
            (nn.remat(Block), nn.remat(ExpertBlock)) if self.remat else (Block, ExpertBlock)
        )
        for i in range(self.num_layers):
            if i % 2:
                sizes = self.num_heads, self.num_experts, self.group_size, self.widening
                x, extra = expert(*sizes, self.dtype, name=f"block_{i}")(x)
                balance += extra
            else:
                x = dense(self.num_heads, self.dtype, widening=self.widening, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return embed.attend(x).astype(jnp.float32), balance


@dataclass(frozen=True, slots=True)
class MoE(Model):
    """A mixture of experts with the cross-entropy of each position's label + 0.01 x balance loss.

    Attributes:
        group_size: tokens that are dispatched together; must divide batch_size x sequence_length.
        widening: width of the feed-forward layers and experts, as a multiple of `hidden_size`.
        compute_dtype: dtype of activations and matrix products; parameters, gates, softmax and loss
            are float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
        optimizer: "adafactor" (Shazeer and Stern, 2018) stores a row and a column of second moments
            for each matrix, "adam" two moments for each parameter.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_experts: int
    group_size: int
    sequence_length: int
    vocab_size: int
    batch_size: int
    widening: int = 4
    compute_dtype: ComputeDtype = "float32"
    remat: bool = False
    optimizer: Literal["adam", "adafactor"] = "adam"

    @override
    def init_state(self, key: jax.Array) -> TrainState:
        module = self.module(MoEModule)
        params = module.init(key, jnp.zeros((self.batch_size, self.sequence_length), jnp.int32))
        optimizer = {"adam": optax.adam, "adafactor": optax.adafactor}[self.optimizer]
        return train_state(module.apply, params, optimizer(learning_rate=1e-3))

    @override
    def make_batch(self, key: jax.Array) -> Batch:
        tokens, labels = jax.random.randint(
            key, (2, self.batch_size, self.sequence_length), 0, self.vocab_size
        )
        return {"tokens": tokens, "labels": labels}

    @override
    def train_step(
        self, state: TrainState, batch: Batch, value_and_grad: ValueAndGrad = jax.value_and_grad
    ) -> tuple[TrainState, jax.Array]:
        def loss(params: nn.FrozenDict) -> jax.Array:
            logits, balance = state.apply_fn(params, batch["tokens"])
            return (
                optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
                + 0.01 * balance
            )

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value
