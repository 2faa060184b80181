"""The memory that XLA reserves for buffers: it packs them into one heap, which may have gaps.

XLA fixes the offset of every temporary buffer while it compiles. It places one buffer after the
other where it is free while the buffer is live: in the smallest gap that is large enough, or behind
all others (best fit). Two orders are tried, by decreasing size and by decreasing lifetime, and the
smaller heap is taken (`GlobalDecreasingSizeBestFitHeap` in XLA). Given the live ranges of a
compiled program, the result is the size that XLA reserves.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

_NEGLIGIBLE = 1e-3
"""Buffers below this part of the largest one are not placed: they fit into gaps."""

_END = 2.0**62
"""The end of the address space, in bytes."""


def packed_bytes(ranges: Iterable[tuple[int, int, float]]) -> float:
    """Return the bytes of the heap that holds buffers with the given live ranges.

    Args:
        ranges: first point, last point (included) and bytes of each buffer.
    """
    return _packed_bytes(np.array([*ranges], dtype=float).tobytes())


@lru_cache(maxsize=256)
def _packed_bytes(ranges: bytes) -> float:
    """Return the bytes of the heap for a table of live ranges, shape (buffers, 3), as bytes.

    The search for shardings asks several times for the same choice.
    """
    table = np.frombuffer(ranges).reshape(-1, 3)
    first, last, size = table[table[:, 2] > _NEGLIGIBLE * table[:, 2].max(initial=0.0)].T
    by_size = np.lexsort((first, first - last, -size))
    by_lifetime = np.lexsort((first, -size, first - last))
    return min(_heap_bytes(first[o], last[o], size[o]) for o in (by_size, by_lifetime))


def _heap_bytes(first: np.ndarray, last: np.ndarray, size: np.ndarray) -> float:
    """Return the bytes of the heap if buffers are placed in the given order."""
    offset = np.zeros_like(size)
    for i in range(len(size)):
        is_beside = (first[:i] <= last[i]) & (first[i] <= last[:i])
        below = offset[:i][is_beside]
        order = np.argsort(below)
        ends = np.maximum.accumulate((below + size[:i][is_beside])[order])
        gap_starts = np.concatenate(([0.0], ends))
        gaps = np.append(below[order], _END) - gap_starts
        gaps[gaps < size[i]] = np.inf
        offset[i] = gap_starts[gaps.argmin()]
    return float((offset + size).max(initial=0.0))
