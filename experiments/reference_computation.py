"""A computation that depends on no code of the project: its time says how fast a machine is now."""

import timeit

import numpy as np


def reference_seconds() -> float:
    """Return the seconds of the fastest of five runs of the reference computation."""
    return min(timeit.repeat(_reference, number=1, repeat=5))


def _reference() -> None:
    """Compute one half in Python, the other in NumPy."""
    counts: dict[int, int] = {}
    for number in range(100_000):
        counts[number % 1009] = counts.get(number % 1009, 0) + number
    np.sort(np.sin(np.arange(300_000.0))).cumsum()
