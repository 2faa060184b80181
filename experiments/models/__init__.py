"""The models of the sweep. To add one: a frozen dataclass like `MLP` in a module of its own, a line in `MODELS`, sizes in the YAML."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

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
from simulator.files import brief

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


_MOST = 10**9
"""Of a size."""


def build_model(name: str, size: Mapping[str, Any]) -> Model:
    """The model `name` with the sizes of the YAML; a `ValueError` lists the valid names if one is unknown."""
    cls = MODELS[known("model", name, MODELS)]
    valid = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    hints = get_type_hints(cls)
    for key, value in size.items():
        known(f"size of {name}", key, valid)
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=not isinstance(value, list))
        except ValidationError as error:
            expected = error.errors()[0]["msg"].replace("Input should be", "expected")
            raise ValueError(f"model {name}: {key}: given {brief(value)}; {expected}") from None
        if isinstance(value, int) and hints[key] is int and not 1 <= value <= _MOST:
            raise ValueError(
                f"model {name}: {key}: given {brief(value)}; expected a whole number of 1 to {_MOST}"
            )
    try:
        model = cls(**size)
    except TypeError as error:
        raise ValueError(
            f"model {name} needs more sizes than {brief(dict(size))}: {error}"
        ) from None
    for part, whole in (("num_heads", "hidden_size"), ("num_kv_heads", "num_heads")):
        if part in valid and whole in valid and getattr(model, whole) % getattr(model, part):
            raise ValueError(
                f"model {name}: {part}: given {getattr(model, part)}; expected a divisor of {whole}, which is {getattr(model, whole)}"
            )
    return model
