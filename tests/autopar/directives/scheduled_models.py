"""Models to schedule, written without a thought of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from autopar.directives import ModelSchedule, create_schedule


class MLP(nn.Module):
    """The model of Slapo's tutorial."""

    hidden: int

    def setup(self) -> None:
        self.linear1 = nn.Dense(self.hidden)
        self.linear2 = nn.Dense(self.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear2(nn.gelu(self.linear1(x), approximate=False))


class Attention(nn.Module):
    """Multi-head self-attention with projections of their own."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, hidden = x.shape
        query, key, value = (
            nn.Dense(hidden, name=name)(x).reshape(batch, length, self.heads, -1)
            for name in ("q", "k", "v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return nn.Dense(hidden, name="out")(mixed.reshape(x.shape))


class Block(nn.Module):
    """A transformer block; relu has a derivative of its own."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(self.heads, name="attention")(nn.LayerNorm(name="norm1")(x))
        y = nn.relu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(y)


class Transformer(nn.Module):
    """Embedding, blocks, and logits through the embedding."""

    vocabulary: int = 32
    hidden: int = 16
    heads: int = 4
    layers: int = 2
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.hidden, name="embed")
        x = embed(tokens)
        for number in range(self.layers):
            x = (nn.remat(Block) if self.remat else Block)(self.heads, name=f"block_{number}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def scheduled(model: nn.Module, *args: Any, mesh: Any = 4) -> ModelSchedule:
    return create_schedule(model, jax.eval_shape(model.init, jax.random.key(0), *args), args, mesh)


def mlp_schedule(mesh: Any = 4, hidden: int = 32) -> ModelSchedule:
    """The MLP, without directives yet."""
    return scheduled(MLP(hidden), jnp.zeros((2, 8, hidden)), mesh=mesh)


def tensor_parallel(sch: ModelSchedule) -> None:
    """Megatron's column and row, as in the tutorial."""
    sch["linear1"].shard("kernel", axis=1)
    sch["linear1"].shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    sch["linear2"].sync("fwd_post", "all_reduce")
    sch["linear1"].sync("bwd_post", "all_reduce")


def megatron(sch: ModelSchedule, mesh_axis: str | None = None) -> None:
    """Every block of a `Transformer`, by column and by row."""
    for column in (
        "block_*/attention/q",
        "block_*/attention/k",
        "block_*/attention/v",
        "block_*/up",
    ):
        sch[column].shard("kernel", axis=1, mesh_axis=mesh_axis).shard(
            "bias", axis=0, mesh_axis=mesh_axis
        )
    for row in ("block_*/attention/out", "block_*/down"):
        sch[row].shard("kernel", axis=0, mesh_axis=mesh_axis).sync(
            "fwd_post", "all_reduce", mesh_axis=mesh_axis
        )
    for entry in ("block_*/attention", "block_*/up"):
        sch[entry].sync("bwd_post", "all_reduce", mesh_axis=mesh_axis)


def collectives(
    compiled: Any,
    kinds: Sequence[str] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
) -> dict:
    """How many collectives of each kind a compiled function has, those of single numbers left out."""
    lines = [
        line
        for line in compiled.as_text().splitlines()
        if " = " in line and "[]" not in line.split(" = ")[1][:8]
    ]
    counts = {
        kind: sum(f" {kind}(" in line or f" {kind}-start(" in line for line in lines)
        for kind in kinds
    }
    return {kind: count for kind, count in counts.items() if count}
