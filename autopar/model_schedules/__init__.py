"""Schedules of model families, after Slapo's, for Flax modules with any module names.

sch = autopar.create_schedule(model, params, [tokens], mesh=(2, 4))
schedule_gpt(sch, Knobs(batch_axis="x", sequence_parallel=True))
built = autopar.build(sch, batch_axis="x")
"""

from autopar.model_schedules.attention import causal_flash_attention, flash_attention
from autopar.model_schedules.knobs import Knobs
from autopar.model_schedules.transformer_families import (
    BERT,
    GPT,
    LLAMA,
    schedule_bert,
    schedule_gpt,
    schedule_llama,
)
from autopar.model_schedules.transformer_schedule import (
    ColumnRowLayer,
    TransformerNames,
    split_layer,
)
from autopar.model_schedules.wide_resnet_schedule import (
    WIDE_RESNET,
    ResNetNames,
    schedule_wide_resnet,
)

__all__ = [
    "BERT",
    "GPT",
    "LLAMA",
    "WIDE_RESNET",
    "ColumnRowLayer",
    "Knobs",
    "ResNetNames",
    "TransformerNames",
    "causal_flash_attention",
    "flash_attention",
    "schedule_bert",
    "schedule_gpt",
    "schedule_llama",
    "schedule_wide_resnet",
    "split_layer",
]
