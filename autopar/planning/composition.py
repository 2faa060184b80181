"""Composition of layers into a stage that fits in memory.

The layers of a stage share its memory. Each layer contributes the hull of its shardings
(`layer_costs`). Starting from the fastest points, layers move along their hulls, the move with the
smallest price per byte first, until the stage fits. This is the Lagrangian relaxation of the
selection problem of the whole stage, so its bound proves how good a sharding composed of the
layers' shardings is.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from autopar.planning.layer_costs import LayerCost, LayerFront, MeshChoice, price_between
from autopar.planning.stage_problem import StageCost
from autopar.sharding.selection_problem import InfeasibleError

_MIN_GAIN = 2e-3
"""Smallest share of a stage's time for which another point of a layer's hull is computed."""

_FIRST_PRICE = 4.0
"""Price of all memory as a multiple of the time without a price, and its growth from there."""

_MAX_PRICES = 6
"""Most prices of memory above 0 at which a bound is computed."""

_CLOSE = 0.01
"""Relative difference of the bound at the best price that is known and its upper limit."""

type _Points = dict[LayerFront, list[LayerCost]]
"""Points of each front: the points of its hull, or one point per layer."""


@dataclass(frozen=True)
class ComposedStage:
    """A stage as a composition of layers, each with a sharding of its own.

    Attributes:
        mesh_choice: logical mesh of the stage.
        start: number of the first layer.
        layers: front and selected point of each layer.
        price: price of memory in seconds per byte and step; 0 if memory is no constraint.
    """

    mesh_choice: MeshChoice
    start: int
    layers: tuple[tuple[LayerFront, LayerCost], ...]
    price: float

    @cached_property
    def cost(self) -> StageCost:
        """Cost of the stage, as the sum of its layers' costs.

        Only the layer with the largest temporaries counts with them.
        """
        points = [point for _, point in self.layers]
        activations = sum(point.priced.saved_bytes for point in points)
        resident = sum(point.priced.resident_bytes for point in points)
        return StageCost(
            seconds=sum(point.seconds for point in points),
            once_seconds=sum(point.once_seconds for point in points),
            fixed_bytes=resident - activations + max(point.priced.extra_bytes for point in points),
            micro_batch_bytes=activations,
            logical_shape=self.mesh_choice.shape,
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of all microbatches, one after the other."""
        return sum(point.priced.seconds for _, point in self.layers)

    def bound(self, in_flight: int, budget: float) -> float:
        """Return a lower bound of the seconds of a step, for every sharding that fits.

        Args:
            in_flight: number of microbatches in flight.
            budget: bytes of one device that the stage may use.
        """
        if not self.price:
            return sum(front.cheapest.priced.bound for front, _ in self.layers)
        counts = Counter(front for front, _ in self.layers)
        return _priced_bound(counts, self.price, in_flight, budget)


def may_be_faster(
    fronts: Sequence[LayerFront],
    in_flight: int,
    budget: float,
    limit: float,
    price: float = 0.0,
) -> bool:
    """Return whether a composition of layers may fit in memory and be faster than a limit.

    Args:
        fronts: front of each layer.
        in_flight: number of microbatches in flight.
        budget: bytes of one device that the stage may use.
        limit: seconds of a step.
        price: a price of memory to start from, such as that of another composition of the layers.
            Each next one is where the tangent of the bound reaches the limit.
    """
    counts = Counter(fronts)
    if _least_bytes(counts, in_flight) > budget:
        return False
    if limit == inf:
        return True
    for _ in range(_MAX_PRICES):
        points = [
            (count, (front.at(price, in_flight) if price else front.cheapest).priced)
            for front, count in counts.items()
        ]
        bound = sum(count * point.bound for count, point in points) - price * budget
        excess = sum(count * point.bytes(in_flight) for count, point in points) - budget
        if bound >= limit:
            return False
        if excess <= 0:
            break
        price += (limit - bound) / excess
    return True


def _least_bytes(counts: Counter[LayerFront], in_flight: int) -> float:
    """Return a lower bound of the memory of layers together while one of them runs."""
    least = {front: front.least_bytes(in_flight) for front in counts}
    resident = sum(count * least[front][0] for front, count in counts.items())
    return resident + max(running - alone for alone, running in least.values())


def _priced_bound(
    counts: Counter[LayerFront], price: float, in_flight: int, budget: float
) -> float:
    """Return a lower bound of the seconds of a step of layers that fit, at a price of memory."""
    priced = sum(n * front.at(price, in_flight).priced.bound for front, n in counts.items())
    return priced - price * budget


def least_within_memory(
    front: LayerFront, count: int, num_micro_batches: int, room: float, limit: float
) -> float:
    """Return a lower bound of the seconds of equal layers of one program that fit in memory.

    It is infinite if they do not fit.

    As a function of the price of memory the bound is concave. Each price is where the tangents
    meet that belong to the next lower price and to the next higher one (Kelley, J. SIAM 1960).

    Args:
        front: the layer.
        count: number of such layers.
        num_micro_batches: number of microbatches, at least as many as the step has.
        room: bytes of one device.
        limit: bound from which on no closer one is looked for.
    """

    def tangent(price: float) -> tuple[float, float]:
        """Return the slope of the tangent at a price, and its value at price 0."""
        bound, num_bytes = front.least_as_program(num_micro_batches, price)
        slope = count * num_bytes - room
        return slope, count * (bound - price * num_bytes)

    try:
        _, least_bytes = front.least_as_program(num_micro_batches, inf)
        if count * least_bytes > room:
            return inf
        low, high = tangent(0.0), None
        best = low[1]
        price = _FIRST_PRICE * best / room if room > 0 else 0.0
        for _ in range(_MAX_PRICES):
            if low[0] <= 0 or not price or best >= limit:
                break
            slope, value = tangent(price)
            best = max(best, value + price * slope)
            if slope <= 0:
                high = slope, value
            else:
                low = slope, value
            if high is None:
                price *= _FIRST_PRICE
                continue
            price = max(0.0, high[1] - low[1]) / (low[0] - high[0])
            if low[1] + price * low[0] <= (1 + _CLOSE) * best:
                break
    except InfeasibleError:
        return inf
    return best


def compose(
    mesh_choice: MeshChoice,
    start: int,
    fronts: Sequence[LayerFront],
    in_flight: int,
    budget: float,
) -> ComposedStage | None:
    """Return the cheapest points of layers that fit in memory together; None if none do.

    Args:
        mesh_choice: logical mesh of the stage.
        start: number of the first layer.
        fronts: front of each layer on that mesh.
        in_flight: number of microbatches in flight.
        budget: bytes of one device that the stage may use.
    """
    if _bytes((front.cheapest for front in fronts), in_flight) <= budget:
        fastest = tuple((front, front.cheapest) for front in fronts)
        return ComposedStage(mesh_choice, start, fastest, 0.0)
    counts = Counter(fronts)
    hull = 1 << (in_flight - 1).bit_length()  # one hull serves several numbers in flight
    while True:
        hulls = {front: front.hull(hull) for front in counts}
        selected, price = _move(counts, hulls, hull, in_flight, budget)
        if selected is None:
            if any([front.add_smallest(hull) for front in counts]):
                continue
            return None
        if not _refine(hulls, selected, hull):
            break
    _relax(selected, in_flight, budget)
    layers = tuple((front, selected[front].pop(0)) for front in fronts)
    return ComposedStage(mesh_choice, start, layers, price)


def _move(
    counts: Counter[LayerFront], hulls: _Points, hull: int, in_flight: int, budget: float
) -> tuple[_Points | None, float]:
    """Move layers along their hulls, in the order of the price, until they fit together.

    Returns:
        The point of every layer and the price of the last move; None and 0 if they do not fit.
    """
    selected = {front: [hulls[front][0]] * count for front, count in counts.items()}
    moves = [
        (price_between(a, b, hull), order, i, front, b)
        for order, front in enumerate(counts)
        for i, (a, b) in enumerate(pairwise(hulls[front]))
    ]
    for price, _, _, front, smaller in sorted(moves, key=lambda move: move[:3]):
        for layer in range(counts[front]):
            selected[front][layer] = smaller
            if _fits(selected, in_flight, budget):
                return selected, price
    return None, 0.0


def _refine(hulls: _Points, selected: _Points, hull: int) -> bool:
    """Look for a new point between two of a hull where it could save enough time.

    Between points that all layers have moved beyond, a new one would be left behind as well, so
    that only the points in front of selected ones matter.

    Returns:
        Whether there is a new point. The largest possible gains come first.
    """
    total = sum(point.priced.seconds for points in selected.values() for point in points)
    gains = []
    for front, points in hulls.items():
        for i, (a, b) in enumerate(pairwise(points)):
            if not any(point is b for point in selected[front]):
                continue
            num_beyond = sum(
                any(point is other for other in points[i + 1 :]) for point in selected[front]
            )
            gain = num_beyond * (b.priced.seconds - a.priced.seconds)
            if gain > _MIN_GAIN * total:
                gains.append((-gain, len(gains), front, a, b))
    gains.sort(key=lambda entry: entry[:2])
    return any(front.refine(hull, a, b) for _, _, front, a, b in gains)


def _relax(selected: _Points, in_flight: int, budget: float) -> None:
    """Move one layer of each front to the fastest point that still fits.

    The memory that is left is less than the last move of the hulls.
    """
    for front, points in selected.items():
        slowest = max(range(len(points)), key=lambda i: points[i].priced.seconds)
        current = points[slowest]
        for other in sorted(front.points, key=lambda point: point.priced.seconds):
            points[slowest] = other
            if other is current or _fits(selected, in_flight, budget):
                break
            points[slowest] = current


def _fits(selected: _Points, in_flight: int, budget: float) -> bool:
    return _bytes((point for points in selected.values() for point in points), in_flight) <= budget


def _bytes(points: Iterable[LayerCost], in_flight: int) -> float:
    """Return the memory of layers together: their resident bytes, and the largest temporaries."""
    resident = temporaries = 0.0
    for point in points:
        resident += point.priced.bytes(in_flight)
        temporaries = max(temporaries, point.priced.extra_bytes)
    return resident + temporaries
