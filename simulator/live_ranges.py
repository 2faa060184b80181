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
    ranges: Iterable[LiveRange], num_points: int, among: Sequence[int] = ()
) -> dict[Role, float]:
    """Return the bytes by role at the first point where most bytes are live.

    Args:
        ranges: all live ranges.
        num_points: number of points.
        among: the points to consider; by default all.
    """
    ranges = list(ranges)
    total = live_bytes((live[:3] for live in ranges), num_points)
    peak = max(among or range(num_points), key=lambda point: total[point], default=0)
    sizes: dict[Role, float] = {}
    for live in ranges:
        if live.first <= peak <= live.last:
            sizes[live.role] = sizes.get(live.role, 0.0) + live.num_bytes
    return {role: size for role, size in sizes.items() if size}


def levels_by_point(ranges: Iterable[LiveRange], num_points: int) -> list[dict[Role, float]]:
    """Return the bytes by role that are live at each point.

    Args:
        ranges: all live ranges.
        num_points: number of points.
    """
    by_role: dict[Role, list[tuple[int, int, float]]] = {}
    for live in ranges:
        by_role.setdefault(live.role, []).append(live[:3])
    levels: list[dict[Role, float]] = [{} for _ in range(num_points)]
    for role, lives in by_role.items():
        for level, num_bytes in zip(levels, live_bytes(lives, num_points).tolist(), strict=True):
            if num_bytes:
                level[role] = num_bytes
    return levels


def fullest(levels: Iterable[Mapping[Role, float]]) -> Mapping[Role, float]:
    """Return the first level with most bytes; an empty one if there are none."""
    return max(levels, key=lambda level: sum(level.values()), default={})


def role_of_value(writers: Collection[Pass], readers: Collection[Pass]) -> Role:
    """Return the role of a value from the passes that write and read it."""
    if "backward" in writers and "other" in readers:
        return "gradients"
    if "forward" in writers and "backward" in readers:
        return "activations"
    return "temporaries"
