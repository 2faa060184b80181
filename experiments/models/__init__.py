"""The models of the sweep. To add one: a frozen dataclass like `MLP` in a module of its own, a line in `MODELS`, sizes in the YAML."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from experiments.models.bert import BERT
from experiments.models.gpt import GPT
from experiments.models.llama import Llama
from experiments.models.lstm import LSTM
from experiments.models.mlp import MLP
from experiments.models.model import Model
from experiments.models.moe import MoE
from experiments.models.nnx_mlp import NnxMLP
from experiments.models.unet import UNet
from experiments.models.vit import ViT
from experiments.models.wide_resnet import WideResNet
from experiments.names import known

__all__ = [
    "BERT",
    "GPT",
    "LSTM",
    "MLP",
    "MODELS",
    "Llama",
    "MoE",
    "Model",
    "NnxMLP",
    "UNet",
    "ViT",
    "WideResNet",
    "build_model",
]

MODELS: dict[str, type[Model]] = {
    "mlp": MLP,
    "nnx_mlp": NnxMLP,
    "gpt": GPT,
    "bert": BERT,
    "moe": MoE,
    "wide_resnet": WideResNet,
    "vit": ViT,
    "unet": UNet,
    "lstm": LSTM,
    "llama": Llama,
}


def build_model(name: str, size: Mapping[str, Any]) -> Model:
    """The model `name` with the sizes of the YAML; a `ValueError` lists the valid names if one is unknown."""
    cls = MODELS[known("model", name, MODELS)]
    valid = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    for key in size:
        known(f"size of {name}", key, valid)
    try:
        return cls(**size)
    except TypeError as error:
        raise ValueError(f"model {name} needs more sizes than {dict(size)}: {error}") from None
