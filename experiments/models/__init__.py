"""The models of the sweep.

To add one, write a frozen dataclass like `MLP` in a module of its own, add a line to `MODELS`, and
add its sizes to the configuration.
"""

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
from experiments.names import check_name
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

_LARGEST_SIZE = 10**9


def build_model(name: str, size: Mapping[str, Any]) -> Model:
    """Return a model of given sizes.

    Args:
        name: one of `MODELS`.
        size: the fields of the model, from the configuration.

    Raises:
        ValueError: a name is unknown, a size is missing or out of range, or sizes do not divide.
    """
    cls = MODELS[check_name("model", name, MODELS)]
    valid = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
    hints = get_type_hints(cls)
    for key, value in size.items():
        check_name(f"size of {name}", key, valid)
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=not isinstance(value, list))
        except ValidationError as error:
            expected = error.errors()[0]["msg"].replace("Input should be", "expected")
            raise ValueError(f"model {name}: {key}: given {brief(value)}; {expected}") from None
        if isinstance(value, int) and hints[key] is int and not 1 <= value <= _LARGEST_SIZE:
            raise ValueError(
                f"model {name}: {key}: given {brief(value)};"
                f" expected a whole number of 1 to {_LARGEST_SIZE}"
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
                f"model {name}: {part}: given {getattr(model, part)};"
                f" expected a divisor of {whole}, which is {getattr(model, whole)}"
            )
    return model
