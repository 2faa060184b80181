"""Names that tables of steps give to GPUs, precisions and models."""

import re
from collections.abc import Mapping

from simulator.transformer.precision import Precision
from simulator.validation.step_rows import StepRow, StepRowError

PRECISIONS: Mapping[str, Precision] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "f16",
    "f16": "f16",
    "float16": "f16",
    "fp8": "f8",
    "float8": "f8",
    # abbreviations of NeMo and Megatron-Bridge: a scale per block (SC), or microscaling (MX)
    "fp8-sc": "f8-block",
    "fp8-block": "f8-block",
    "fp8-blockwise": "f8-block",
    "fp8-mx": "mxfp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "": "bf16",
}
"""Precisions by the words of their names that count."""

_OF_PRECISION = {"mixed", "precision", "hybrid", "e4m3", "e5m2"}
_OF_PRECISION |= {"cs", "ds", "tensorwise", "current", "delayed", "dynamic", "scaling"}
"""Words beside a precision: what stays in 16 or 32 bits, formats of 8 bits, and when the scale of a
tensor is computed, in this step (CS) or an earlier one (DS)."""


def gpu_name(row: StepRow) -> str:
    """Return the name of the GPU of a row in capitals, without what all of its kind share."""
    name = re.sub(r"^(NVIDIA|TESLA|DGX|HGX)[ -]", "", row.gpu.strip().upper())
    name = re.sub(r"[ -]?(SXM\d?|NVL72)", "", name).replace(" ", "-")
    name = re.sub(r"^V100$", "V100-16GB", name)
    return re.sub(r"^(H100|H200|B200|GB200|B300|GB300|A800)-\d+GB$", r"\1", name)


def precision_of(row: StepRow) -> Precision:
    """Return the precision of a row.

    Raises:
        StepRowError: it is unknown.
    """
    words = re.findall(r"[a-z0-9]+", row.precision.lower())
    name = "-".join(word for word in words if word not in _OF_PRECISION)
    if name not in PRECISIONS:
        known = ", ".join(precision for precision in PRECISIONS if precision)
        raise StepRowError(f"column precision: given {row.precision!r}, expected one of {known}")
    return PRECISIONS[name]


def recipe_name(row: StepRow) -> str:
    """Return the name of a recipe: "model GPU precision", in small letters and without spaces.

    Raises:
        StepRowError: the precision is unknown.
    """
    model = re.sub(r"\s+", "-", row.model.strip())
    return f"{model} {gpu_name(row)} {precision_of(row)}".lower()
