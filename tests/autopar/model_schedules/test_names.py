"""Shipped schedules apply to a model with other module names and Flax's own attention."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import linen as nn

from autopar import model_schedules as shipped
from autopar.directives import Verify
from autopar.model_schedules import ColumnRowLayer, Knobs
from tests.autopar.directives.scheduled_models import scheduled

TOKENS = np.arange(32).reshape(4, 8) * 7 % 32


def attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: object) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """A block whose projections have kernels with a dim for heads and one for head features."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attend = nn.MultiHeadDotProductAttention(4, attention_fn=attention, name="attn")
        x = x + attend(nn.LayerNorm(name="ln_1")(x))
        return x + nn.Dense(16, name="c_proj")(
            nn.gelu(nn.Dense(64, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        )


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 16, name="wte")(tokens)
        for number in range(2):
            x = Block(name=f"h_{number}")(x)
        return nn.Dense(32, name="lm_head")(x)


NAMES = replace(
    shipped.GPT,
    blocks="h_*",
    attention=ColumnRowLayer("attn", ("query", "key", "value"), "out"),
    feed_forward=ColumnRowLayer("", ("c_fc",), "c_proj"),
    embedding="wte",
    head="lm_head",
)


@pytest.mark.slow
def test_a_shipped_schedule_applies_to_other_module_names() -> None:
    """The feed-forward layer of a block is not a module, and attention is Flax's."""
    sch = scheduled(Decoder(), TOKENS)
    knobs = Knobs(
        sequence_parallel=True, vocabulary_parallel=True, flash_attention=True, checkpoint_ratio=1.0
    )
    shipped.schedule_gpt(sch, knobs, NAMES)
    Verify(sch, [TOKENS]).check()
