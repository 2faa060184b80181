"""Recipes of precision: which products have few bits, and what casts to them move.

Products of linear layers, experts included, are in the type of the recipe in the forward pass and
for both gradients. Attention, the router, the embedding and the loss stay in 16 bits, and so does
what devices send to each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "f16", "f8", "f8-block", "mxfp8", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a precision does beside products of 16 bits.

    Attributes:
        dtype: HLO type of the products of linear layers; None for 16 bits.
        cast_bytes: bytes that a cast moves per element: the value of 16 bits, and its cast in two
            layouts, since the products of gradients read it transposed, each with its scales.
    """

    dtype: str | None = None
    cast_bytes: float = 0.0


def _cast_bytes(width: float, scale: float, reads: int = 1) -> float:
    """Return the bytes that a cast moves per element.

    Args:
        width: bytes of an element of the cast.
        scale: bytes of scales per element of the cast.
        reads: reads of the value; a scale of the whole tensor needs one more than a scale that was
            known before.
    """
    return 2.0 * reads + 2 * (width + scale)


RECIPES: Mapping[Precision, Recipe] = {
    "bf16": Recipe(),
    "f16": Recipe(),
    # one scale per tensor, from the steps before
    "f8": Recipe("f8e4m3fn", _cast_bytes(1, 0)),
    # a scale of f32 per 128 elements (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    "f8-block": Recipe("f8e4m3fn", _cast_bytes(1, 4 / 128)),
    # a scale of 8 bits per 32 elements (OCP microscaling formats 1.0)
    "mxfp8": Recipe("f8e4m3fn", _cast_bytes(1, 1 / 32)),
    "mxfp4": Recipe("f4e2m1fn", _cast_bytes(0.5, 1 / 32)),
    # a scale of 8 bits per 16 elements, and one of the whole tensor (arXiv 2509.25149)
    "nvfp4": Recipe("f4e2m1fn", _cast_bytes(0.5, 1 / 16, reads=2)),
}
"""Recipes by the name of the precision."""
