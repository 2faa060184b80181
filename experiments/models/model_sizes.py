"""Models in the sizes of tests and of papers.

Sizes of papers are those of Alpa's benchmark suites (Zheng et al., OSDI'22, section 8 and the
folder `benchmark` of its repository): hidden size, layers and heads or experts of GPT and MoE,
channels and width of Wide-ResNet. GPT and MoE train in float16 with rematerialization, Wide-ResNet
in float32. Batches fit on a single host of eight devices without microbatches.
"""

from dataclasses import replace

from experiments.models.bert import BERT
from experiments.models.gpt import GPT
from experiments.models.lstm import LSTM
from experiments.models.mlp import MLP
from experiments.models.model import Model
from experiments.models.moe import MoE
from experiments.models.nnx_mlp import NnxMLP
from experiments.models.unet import UNet
from experiments.models.vit import ViT
from experiments.models.wide_resnet import WideResNet

_SMALL_GPT = GPT(
    num_layers=2, hidden_size=32, num_heads=8, sequence_length=16, vocab_size=64, batch_size=8
)

SMALL: dict[str, Model] = {
    "mlp": MLP(dim=32, num_layers=4, batch_size=16),
    "nnx_mlp": NnxMLP(dim=32, num_layers=2, batch_size=16),
    "gpt": _SMALL_GPT,
    "gpt_scanned": replace(_SMALL_GPT, scan_layers=True, remat=True),
    "bert": BERT(
        num_layers=1, hidden_size=32, num_heads=8, sequence_length=16, vocab_size=64, batch_size=8
    ),
    "moe": MoE(
        num_layers=2,
        hidden_size=32,
        num_heads=8,
        num_experts=8,
        group_size=16,
        sequence_length=16,
        vocab_size=64,
        batch_size=8,
    ),
    "wide_resnet": WideResNet(
        num_layers=8, channels=8, width=2, image_size=32, num_classes=16, batch_size=16
    ),
    "vit": ViT(
        num_layers=1,
        hidden_size=32,
        num_heads=8,
        patch_size=4,
        image_size=16,
        num_classes=16,
        batch_size=16,
    ),
    "unet": UNet(channels=8, depth=1, image_size=16, batch_size=16),
    "lstm": LSTM(num_layers=1, hidden_size=32, sequence_length=8, vocab_size=64, batch_size=16),
}
"""One of each model, small enough to train on a CPU in a second."""


def gpt(hidden_size: int, num_layers: int, num_heads: int, batch_size: int) -> GPT:
    """Return a GPT of Alpa's suite: 1024 tokens, a vocabulary of 51200."""
    return GPT(num_layers, hidden_size, num_heads, 1024, 51200, batch_size, "float16", remat=True)


def moe(hidden_size: int, num_layers: int, num_experts: int, batch_size: int) -> MoE:
    """Return an MoE of Alpa's suite.

    It has 1024 tokens, a vocabulary of 32000, 16 heads, groups of 2048 tokens and experts that are
    8 x as wide in between.
    """
    return MoE(
        num_layers,
        hidden_size,
        16,
        num_experts,
        2048,
        1024,
        32000,
        batch_size,
        8,
        "float16",
        remat=True,
    )


def wide_resnet(num_layers: int, channels: int, width: int, batch_size: int) -> WideResNet:
    """Return a Wide-ResNet of Alpa's suite: 224 x 224 pixels, 1024 classes."""
    return WideResNet(num_layers, channels, width, 224, 1024, batch_size)


PUBLISHED: dict[str, Model] = {
    "gpt-350M": gpt(1024, 24, 16, batch_size=32),
    "gpt-760M": gpt(1536, 24, 16, batch_size=32),
    "gpt-1.3B": gpt(2048, 24, 32, batch_size=32),
    "gpt-2.6B": gpt(2560, 32, 32, batch_size=32),
    "moe-380M": moe(768, 8, 8, batch_size=32),
    "moe-690M": moe(768, 8, 16, batch_size=32),
    "moe-1.3B": moe(768, 16, 16, batch_size=32),
    "moe-2.4B": moe(1024, 16, 16, batch_size=32),
    "wide_resnet-250M": wide_resnet(50, 160, 2, batch_size=64),
    "wide_resnet-500M": wide_resnet(50, 224, 2, batch_size=64),
    "wide_resnet-1B": wide_resnet(50, 320, 2, batch_size=64),
    "wide_resnet-2B": wide_resnet(50, 448, 2, batch_size=64),
}
"""The models of Alpa's suites that fit on a host, by name and number of parameters."""
