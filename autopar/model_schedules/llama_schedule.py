"""Directives for LLaMA (Touvron et al., 2023): no biases, gated MLPs, and untied logits."""

from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.attention import causal_attention, causal_flash_attention
from autopar.model_schedules.knobs import Knobs
from autopar.model_schedules.transformer_schedule import (
    ColumnRowLayer,
    TransformerNames,
    schedule_transformer,
)

LLAMA = TransformerNames(
    blocks="block_*",
    attention=ColumnRowLayer("attention", ("query", "key", "value"), "out"),
    feed_forward=ColumnRowLayer("feed_forward", ("gate", "up"), "down"),
    embedding="tokens",
    head="head",
    attend=causal_attention,
    flash=causal_flash_attention,
)


def schedule_llama(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = LLAMA
) -> None:
    """Add the directives for a decoder like LLaMA.

    Query heads that share a key head stay on one device, so the tensor axis can't have more devices
    than there are key heads.
    """
    schedule_transformer(sch, knobs or Knobs(), names)
