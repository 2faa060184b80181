"""Steps of Megatron-LM's models on A100s, as in Narayanan et al. (arXiv 2104.04473)."""

from typing import Any

from simulator import Cluster, Prediction
from simulator.transformer import Execution, Machine, Transformer, predict

GPT = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
"""The sizes of GPT-3, 175 billion parameters."""


def sized(layers: int, hidden: int, heads: int) -> Transformer:
    """Return a GPT with other sizes but the same sequence length and vocabulary."""
    return GPT.model_copy(update={"layers": layers, "hidden": hidden, "heads": heads})


def machine(gpus: int) -> Machine:
    """Return whole hosts of 8 A100s with 80 GB and 8 NICs."""
    return Machine(Cluster.load("dgx_a100_80").with_size(-(-gpus // 8)))


def step(model: Transformer, gpus: int, **fields: Any) -> Prediction:
    """Predict a step of Megatron-LM with full recomputation, which divides sent activations.

    Args:
        model: the model.
        gpus: the number of GPUs.
        fields: fields of the execution; the data axis has the remaining GPUs.
    """
    degrees = fields.get("tensor", 1) * fields.get("pipeline", 1)
    defaults = {"data": gpus // degrees, "recompute": "full", "scatter_sends": True}
    execution = Execution.model_validate(defaults | fields)
    return predict(model, execution, machine(gpus))


def throughput(prediction: Prediction) -> dict[str, Any]:
    """Return the columns of a row: TFLOP/s of each GPU, as the paper counts them, and memory."""
    rate = prediction.hardware_flops / prediction.seconds / prediction.devices
    return {
        "ours": rate / 1e12,
        "unit": "TFLOP/s per GPU",
        "seconds": prediction.seconds,
        "memory_gb": prediction.memory.total / 1e9,
        "fits": prediction.memory.fits,
    }
