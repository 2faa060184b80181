"""Strategies for MLP and GPT written with explicit collectives, as a baseline for planned ones."""

from experiments.by_hand.data_parallel import DataParallel
from experiments.by_hand.fsdp import Fsdp
from experiments.by_hand.hand_written import HandWritten
from experiments.by_hand.pipeline import Pipeline
from experiments.by_hand.tensor_2d import Tensor2D
from experiments.by_hand.tensor_sequence_parallel import Megatron

BY_HAND: dict[str, HandWritten] = {
    "manual_data": DataParallel(),
    "manual_fsdp": Fsdp(),
    "manual_tensor_2d": Tensor2D(),
    "manual_megatron": Megatron(),
    "manual_pipeline": Pipeline(),
}
"""The strategies, by their names in the sweep's configuration."""
