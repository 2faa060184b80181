"""BERT (Devlin et al., 2019): norms after the sums, and logits of masked tokens through the embedding, with a bias."""

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
    """Add the directives for a BERT. What is between the last block and the logits stays whole, or split by tokens."""
    schedule_transformer(sch, knobs or Knobs(), names)
