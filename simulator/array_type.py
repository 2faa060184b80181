"""The type of an array: HLO's name of its elements, and its dims."""

import math
from dataclasses import dataclass

ELEMENT_BITS = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "token": 0,
    "opaque": 0,
}
ELEMENT_BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (8, 16, 32, 64)}
ELEMENT_BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
"""Bits of an element by its type; types of 8-bit floats, which are many, are left out."""


@dataclass(frozen=True, slots=True)
class Array:
    """The element type and the dims of an array.

    Attributes:
        dtype: HLO's name of the type of its elements.
        dims: its dims.
        on_host: whether it is in the memory of the host.
    """

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def real_products(self) -> int:
        """Number of products of real numbers in a product of two elements."""
        return 4 if self.dtype in ("c64", "c128") else 1

    @property
    def item_bytes(self) -> float:
        """Bytes of an element."""
        return (8 if self.dtype.startswith("f8") else ELEMENT_BITS[self.dtype]) / 8

    @property
    def num_bytes(self) -> float:
        """Bytes of the array."""
        return self.size * self.item_bytes
