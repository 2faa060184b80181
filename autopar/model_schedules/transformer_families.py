"""Directives for families of transformers: GPT, BERT and LLaMA."""

from dataclasses import replace

from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.attention import (
    attention,
    causal_attention,
    causal_flash_attention,
    flash_attention,
)
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
"""One product computes queries, keys and values, and logits are tied (Radford et al., 2019)."""

BERT = replace(GPT, attend=attention, flash=flash_attention, head_bias="bias")
"""Logits of masked tokens are tied and have a bias (Devlin et al., 2019)."""

LLAMA = replace(
    GPT,
    attention=ColumnRowLayer("attention", ("query", "key", "value"), "out"),
    feed_forward=ColumnRowLayer("feed_forward", ("gate", "up"), "down"),
    head="head",
)
"""No biases, gated MLPs, and untied logits (Touvron et al., 2023)."""


def schedule_gpt(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = GPT
) -> None:
    """Add the directives for a GPT.

    The columns of `qkv` must be ordered by head: for each head query, then key, then value.
    """
    schedule_transformer(sch, knobs or Knobs(), names)


def schedule_bert(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = BERT
) -> None:
    """Add the directives for a BERT, whose norms follow the sums of residuals.

    Layers between the last block and the logits stay whole, or split by tokens with sequence
    parallelism.
    """
    schedule_transformer(sch, knobs or Knobs(), names)


def schedule_llama(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = LLAMA
) -> None:
    """Add the directives for a decoder like LLaMA.

    Query heads that share a key head stay on one device, so the tensor axis can't have more devices
    than there are key heads.
    """
    schedule_transformer(sch, knobs or Knobs(), names)
