"""Layers together as a stage that fits in memory.

The layers of a stage share its memory. Each gives the hull of its shardings (`layer_costs`); they move along their hulls, the one
that pays the least per byte first, until the stage fits. That is the Lagrangian relaxation of the stage's own problem, and its
bound proves how good a sharding is that is made of the layers' ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autopar.planning.layer_costs import LayerCost, LayerFront, MeshChoice, price_between
from autopar.planning.stage_problem import StageCost

_WORTH = 2e-3
"""Share of a stage's time for which it is worth to look for another sharding of a layer."""

type _Points = dict[LayerFront, list[LayerCost]]
"""The points of every copy of a layer."""


@dataclass(frozen=True)
class ComposedStage:
    """Layers as a stage, each sharded in a way of its own.

    Attributes:
        start: number of the first layer.
        layers: their fronts and the points that were taken.
        price: of the memory, in seconds per byte and step; 0 where there is enough.
    """

    mesh_choice: MeshChoice
    start: int
    layers: tuple[tuple[LayerFront, LayerCost], ...]
    price: float

    @cached_property
    def cost(self) -> StageCost:
        points = [point for _, point in self.layers]
        held = sum(point.priced.held_bytes for point in points)
        return StageCost(
            sum(point.seconds for point in points),
            sum(point.once_seconds for point in points),
            sum(point.priced.resident_bytes for point in points)
            - held
            + max(p.priced.extra_bytes for p in points),
            held,
            self.mesh_choice.shape,
            self,
        )

    @property
    def step_seconds(self) -> float:
        """Of all microbatches, one after the other."""
        return sum(point.priced.seconds for _, point in self.layers)

    def bound(self, in_flight: int, budget: float) -> float:
        """Seconds of a step that no sharding of the stage is below which fits."""
        if not self.price:
            return sum(front.cheapest.priced.bound for front, _ in self.layers)
        counts = Counter(front for front, _ in self.layers)
        least = sum(n * front.at(self.price, in_flight).priced.bound for front, n in counts.items())
        return least - self.price * budget


def compose(
    choice: MeshChoice, start: int, fronts: Sequence[LayerFront], in_flight: int, room: float
) -> ComposedStage | None:
    """The cheapest points of layers that fit into `room` bytes together, with so many microbatches in flight; None if none do."""
    if _bytes((front.cheapest for front in fronts), in_flight) <= room:
        return ComposedStage(choice, start, tuple((front, front.cheapest) for front in fronts), 0.0)
    counts, hull = (
        Counter(fronts),
        1 << (in_flight - 1).bit_length(),
    )  # hulls serve several numbers in flight
    while True:
        hulls = {front: front.hull(hull) for front in counts}
        taken, price = _moved(counts, hulls, hull, in_flight, room)
        if taken is None:
            return None
        if not _refined(hulls, taken, hull):
            break
    _relax(taken, in_flight, room)
    return ComposedStage(
        choice, start, tuple((front, taken[front].pop(0)) for front in fronts), price
    )


def _moved(
    counts: Counter[LayerFront], hulls: _Points, hull: int, in_flight: int, room: float
) -> tuple[_Points | None, float]:
    """A point for every copy of each layer, the smallest first, once all fit together, and the price of the last move."""
    taken = {front: [hulls[front][0]] * n for front, n in counts.items()}
    moves = [
        (price_between(a, b, hull), order, i, front, b)
        for order, front in enumerate(counts)
        for i, (a, b) in enumerate(pairwise(hulls[front]))
    ]
    for price, _, _, front, smaller in sorted(moves, key=lambda move: move[:3]):
        for copy in range(counts[front]):
            taken[front][copy] = smaller
            if _fit(taken, in_flight, room):
                return taken, price
    return None, 0.0


def _refined(hulls: _Points, taken: _Points, hull: int) -> bool:
    """Look for a point between two of a hull, where the time that it could save is worth it; whether one was found."""
    total = sum(point.priced.seconds for points in taken.values() for point in points)
    gains = []
    for front, points in hulls.items():
        for i, (a, b) in enumerate(pairwise(points)):
            beyond = sum(any(point is other for other in points[i + 1 :]) for point in taken[front])
            gain = beyond * (b.priced.seconds - a.priced.seconds)
            if gain > _WORTH * total:
                gains.append((-gain, len(gains), front, a, b))
    return any(
        front.refine(hull, a, b) for _, _, front, a, b in sorted(gains, key=lambda each: each[:2])
    )


def _relax(taken: _Points, in_flight: int, room: float) -> None:
    """Let one copy of each layer take the cheapest point that still fits: what is left of the memory is less than a move."""
    for front, points in taken.items():
        dearest = max(range(len(points)), key=lambda i: points[i].priced.seconds)
        for other in sorted(front.known, key=lambda point: point.priced.seconds):
            kept, points[dearest] = points[dearest], other
            if other is kept or _fit(taken, in_flight, room):
                break
            points[dearest] = kept


def _fit(taken: _Points, in_flight: int, room: float) -> bool:
    return _bytes((point for points in taken.values() for point in points), in_flight) <= room


def _bytes(points: Iterable[LayerCost], in_flight: int) -> float:
    """Memory of layers together: what all of them keep, and the most that one needs beside."""
    kept = extra = 0.0
    for point in points:
        kept += point.priced.bytes(in_flight)
        extra = max(extra, point.priced.extra_bytes)
    return kept + extra
