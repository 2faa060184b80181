"""Directives for GPT (Radford et al., 2019).

The logits are tied, and one product computes queries, keys and values.
"""

from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.attention import causal_attention, causal_flash_attention
from autopar.model_schedules.knobs import Knobs
from autopar.model_schedules.transformer_schedule import (
    ColumnRowLayer,
    TransformerNames,
    schedule_transformer,
)

GPT = TransformerNames(
    blocks="block_*",
    attention=ColumnRowLayer("attention", ("qkv",), "out"),
    feed_forward=ColumnRowLayer("feed_forward", ("up",), "down"),
    embedding="tokens",
    head="tokens",
    attend=causal_attention,
    flash=causal_flash_attention,
)


def schedule_gpt(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = GPT
) -> None:
    """Add the directives for a GPT.

    The columns of `qkv` must be ordered by head: for each head query, then key, then value.
    """
    schedule_transformer(sch, knobs or Knobs(), names)
