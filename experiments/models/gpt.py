"""A GPT-2 style decoder (Radford et al., 2019)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.models.model import ComputeDtype, NextToken
from experiments.models.transformer import Block


class Decoder(nn.Module):
    """Maps token ids (batch, length) to float32 logits (batch, length, vocabulary)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    dtype: Any
    remat: bool
    tied_head: bool
    scan_layers: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype, name="tokens")
        positions = nn.Embed(
            self.sequence_length, self.hidden_size, dtype=self.dtype, name="positions"
        )
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        make = partial(
            nn.remat(Block) if self.remat else Block, self.num_heads, self.dtype, causal=True
        )
        if self.scan_layers:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            layers = nn.scan(lambda block, x, _: (block(x), None), length=self.num_layers, **split)
            x, _ = layers(make(name="blocks"), x, None)
        else:
            for i in range(self.num_layers):
                x = make(name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        head = nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")
        logits = embed.attend(x) if self.tied_head else head(x)
        return logits.astype(jnp.float32)


@dataclass(frozen=True, slots=True)
class GPT(NextToken):
    """GPT with next-token prediction.

    Attributes:
        compute_dtype: dtype of activations and matrix products; parameters, softmax and loss are
            float32.
        remat: recompute each block in the backward pass instead of keeping its activations.
        tied_head: use the token embedding as the output projection, too.
        scan_layers: run one `lax.scan` over stacked blocks instead of unrolled blocks.
    """

    network: ClassVar = Decoder
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocab_size: int
    batch_size: int
    compute_dtype: ComputeDtype = "float32"
    remat: bool = False
    tied_head: bool = True
    scan_layers: bool = False
