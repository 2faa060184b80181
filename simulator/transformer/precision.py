"""Recipes of precision: which products have few bits, and what casts to them move.

Products of linear layers, experts included, are in the type of the recipe in the forward pass and
for both gradients. Attention, the router, the embedding and the loss stay in 16 bits, and so do
sums over devices. What devices gather is cast before by backends that do so (Transformer Engine).
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
        width: bytes of an element, with its part of the scales.
        reads: reads of a value that is cast; a scale of the whole tensor needs one more than a
            scale that was known before.
        scales_blocks: whether each block of a row has a scale, so that the transposed cast is
            another one; with a scale per tensor it is the same.
    """

    dtype: str | None = None
    width: float = 2.0
    reads: int = 0
    scales_blocks: bool = False

    @property
    def cast_bytes(self) -> float:
        """Bytes that a cast moves per element.

        They are the value of 16 bits, and its cast in two layouts, since the products of gradients
        read it transposed.
        """
        return 0.0 if self.dtype is None else 2.0 * self.reads + 2 * self.width

    @property
    def width_of_both(self) -> float:
        """Bytes of an element that products read in both layouts, as it is gathered."""
        return 2 * self.width if self.scales_blocks else self.width

    @property
    def parameter_width(self) -> float:
        """Bytes of a parameter as it is gathered: in 16 bits where blocks have scales."""
        return 2.0 if self.scales_blocks else self.width


RECIPES: Mapping[Precision, Recipe] = {
    "bf16": Recipe(),
    "f16": Recipe(),
    # one scale per tensor, from the steps before
    "f8": Recipe("f8e4m3fn", 1, reads=1),
    # a scale of f32 per 128 elements (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    "f8-block": Recipe("f8e4m3fn", 1 + 4 / 128, reads=1, scales_blocks=True),
    # a scale of 8 bits per 32 elements (OCP microscaling formats 1.0)
    "mxfp8": Recipe("f8e4m3fn", 1 + 1 / 32, reads=1, scales_blocks=True),
    "mxfp4": Recipe("f4e2m1fn", 0.5 + 1 / 32, reads=1, scales_blocks=True),
    # a scale of 8 bits per 16 elements, and one of the whole tensor (arXiv 2509.25149)
    "nvfp4": Recipe("f4e2m1fn", 0.5 + 1 / 16, reads=2, scales_blocks=True),
}
"""Recipes by the name of the precision."""
