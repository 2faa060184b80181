"""Live ranges: when values are in memory, and the bytes that are live at each point, by role.

The planner, analytic predictions and compiled programs all find their peak memory here. A point is
an equation or instruction of a program, in the order in which it runs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from simulator.memory import Role

Pass = Literal["forward", "backward", "other"]
"""The pass of a training step that an operation belongs to; "other" is the update."""


class LiveRange(NamedTuple):
    """Memory that is in use from point `first` to point `last`, both included."""

    first: int
    last: int
    num_bytes: float
    role: Role


def live_bytes(ranges: Iterable[tuple[int, int, float]], num_points: int) -> np.ndarray:
    """Return the bytes that are live at each point, shape (num_points,).

    Args:
        ranges: first point, last point and bytes of each range.
        num_points: number of points.
    """
    change = np.zeros(num_points + 1)
    for first, last, num_bytes in ranges:
        change[first] += num_bytes
        change[last + 1] -= num_bytes
    return np.cumsum(change)[:-1]


def roles_at_peak(
    ranges: Iterable[LiveRange],
    num_points: int,
    inner: Mapping[int, Mapping[Role, float]] | None = None,
    among: Sequence[int] = (),
) -> dict[Role, float]:
    """Return the bytes by role at the first point where most bytes are live.

    Args:
        ranges: all live ranges.
        num_points: number of points.
        inner: bytes by role that a point needs beside the ranges, as the peak of a called program.
        among: the points to consider; by default all.
    """
    ranges = list(ranges)
    inner = inner or {}
    total = live_bytes((live[:3] for live in ranges), num_points)
    for point, roles in inner.items():
        total[point] += sum(roles.values())
    peak = max(among or range(num_points), key=lambda point: total[point], default=0)
    sizes: dict[Role, float] = dict(inner.get(peak, {}))
    for live in ranges:
        if live.first <= peak <= live.last:
            sizes[live.role] = sizes.get(live.role, 0.0) + live.num_bytes
    return {role: size for role, size in sizes.items() if size}


def role_of_value(writers: Collection[Pass], readers: Collection[Pass]) -> Role:
    """Return the role of a value from the passes that write and read it."""
    if "backward" in writers and "other" in readers:
        return "gradients"
    if "forward" in writers and "backward" in readers:
        return "activations"
    return "temporaries"
