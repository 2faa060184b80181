"""Hybrids of Mamba, attention and dense MLPs among measured steps: Nemotron-H."""

import re
from collections.abc import Mapping
from typing import Any

from simulator.hardware.description import validate
from simulator.transformer import Transformer
from simulator.transformer.precision import Precision
from simulator.validation.step_rows import StepRow

_LARGE: Mapping[str, Any] = {"hidden": 8192, "heads": 64} | {
    "mamba": {"heads": 256, "head_size": 64, "state": 256, "groups": 8}
}

_HYBRIDS: Mapping[re.Pattern[str], Mapping[str, Any]] = {
    re.compile(r"nemotron.?5?.?h[\W_]*8b"): {
        "pattern": "M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
        "hidden": 4096,
        "heads": 32,
        "ffn": 21504,
        "mamba": {"heads": 128, "head_size": 64, "state": 128, "groups": 8},
    },
    re.compile(r"nemotron.?5?.?h[\W_]*47b"): _LARGE
    | {
        "pattern": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
        "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        "ffn": 30720,
    },
    re.compile(r"nemotron.?5?.?h[\W_]*56b"): _LARGE
    | {"pattern": "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-", "ffn": 32768},
}
"""Sizes by the name of the model in lower case (NemotronHConfig56B and its neighbours in
github.com/NVIDIA/NeMo, nemo/collections/llm/gpt/model/ssm.py)."""


def is_hybrid(row: StepRow) -> bool:
    """Return whether the model of a row is a known hybrid without experts."""
    return _sizes(row) is not None


def hybrid_model(row: StepRow, precision: Precision, attention: str) -> Transformer:
    """Return the model of a row that is a hybrid, whose sizes follow from its name."""
    sizes = _sizes(row)
    assert sizes is not None
    fields = {
        "layers": len(sizes["pattern"]),
        "kv_heads": 8,
        "head_size": 128,
        "seq": row.seq or 8192,
        "vocab": row.vocab or 131072,
        "learned_positions": False,
        "biases": False,
        "dropout": False,
        "tied": False,
        "attention": attention,
        "precision": precision,
    }
    return validate(Transformer, fields | dict(sizes), "model")


def _sizes(row: StepRow) -> Mapping[str, Any] | None:
    name = row.model.lower()
    return next((sizes for pattern, sizes in _HYBRIDS.items() if pattern.match(name)), None)
