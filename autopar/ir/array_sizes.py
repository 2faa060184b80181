"""Sizes of arrays in bytes, and HLO's names of their element types."""

from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np

from autopar.ir.graph import Atom, aval_of

_HLO_DTYPE = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c"}


@cache
def hlo_dtype(dtype: np.dtype) -> str:
    """Return HLO's name of a dtype: f32 for float32, pred for bool, u32 for random keys."""
    if not isinstance(dtype, np.dtype):
        return "u32"
    name = np.dtype(dtype).name
    if name == "bool":
        return "pred"
    letters = name.rstrip("0123456789")
    return _HLO_DTYPE.get(letters, letters) + name[len(letters) :]


def array_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Return the bytes of an array; an element of a sub-byte type takes one byte.

    JAX's extended dtypes (random keys) have an `itemsize`, too.
    """
    return prod(shape) * dtype.itemsize


def value_bytes(atom: Atom) -> int:
    """Return the bytes of a whole value of a jaxpr."""
    aval = aval_of(atom)
    return array_bytes(aval.shape, aval.dtype)
