"""Handles of arrays on other hosts or in pieces, as a trace sees them."""

from math import prod
from typing import Any

import numpy as np


class ArrayHandle:
    """An array whose data is on other hosts, or in pieces on several meshes.

    Attributes:
        shape: as of a `jax.Array`.
        dtype: as of a `jax.Array`.
        weak_type: as of a `jax.Array`.
        hosts: the hosts that store it.
        array: its name and sharding on these hosts (`autopar.lowering.job.Array`).
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    hosts: Any
    array: Any

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def check(self) -> None:
        """Raise RuntimeError if the hosts no longer store the array."""
