"""Directives for BERT (Devlin et al., 2019).

The logits of masked tokens are tied and have a bias; norms follow the sums of residuals.
"""

from dataclasses import replace

from autopar.directives.scheduled_model import ModelSchedule
from autopar.model_schedules.attention import attention, flash_attention
from autopar.model_schedules.gpt_schedule import GPT
from autopar.model_schedules.knobs import Knobs
from autopar.model_schedules.transformer_schedule import TransformerNames, schedule_transformer

BERT = replace(GPT, attend=attention, flash=flash_attention, head_bias="bias")


def schedule_bert(
    sch: ModelSchedule, knobs: Knobs | None = None, names: TransformerNames = BERT
) -> None:
    """Add the directives for a BERT.

    Layers between the last block and the logits stay whole, or split by tokens with sequence
    parallelism.
    """
    schedule_transformer(sch, knobs or Knobs(), names)
