"""Layers are composed from the points of their hulls that fit together in the least time."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest

from autopar.planning.composition import compose, may_be_faster
from autopar.planning.layer_costs import LayerCost, MeshChoice
from autopar.sharding.lagrangian import Priced


def point(seconds: float, num_bytes: float) -> LayerCost:
    return LayerCost(Priced((), seconds, seconds, num_bytes, 0.0, 0.0), seconds, 0.0)


@dataclass(eq=False)
class KnownFront:
    """A front all of whose points are known.

    Attributes:
        points: the points, the fastest first.
        refined: pairs of points between which another one was looked for.
    """

    points: list[LayerCost]
    refined: list[tuple[LayerCost, LayerCost]] = field(default_factory=list)

    @property
    def cheapest(self) -> LayerCost:
        return self.points[0]

    def hull(self, in_flight: int) -> list[LayerCost]:
        return self.points

    def least_bytes(self, in_flight: int) -> tuple[float, float]:
        least = min(point.priced.bytes(in_flight) for point in self.points)
        return least, least

    def at(self, price: float, in_flight: int) -> LayerCost:
        costs = [p.priced.seconds + price * p.priced.bytes(in_flight) for p in self.points]
        best = self.points[costs.index(min(costs))]
        return replace(best, priced=replace(best.priced, bound=min(costs)))

    def add_smallest(self, in_flight: int) -> bool:
        return False

    def refine(self, in_flight: int, a: LayerCost, b: LayerCost) -> bool:
        self.refined.append((a, b))
        return False


HULL = [point(1.0, 10.0), point(2.0, 6.0), point(4.0, 3.0), point(8.0, 1.0)]


@pytest.mark.parametrize(
    ("budget", "seconds"), [(20, 2), (16, 3), (12, 4), (9, 6), (6, 8), (2, 16)]
)
def test_two_equal_layers_take_the_fastest_points_that_fit(budget, seconds):
    front: Any = KnownFront(list(HULL))
    stage = compose(MeshChoice((1,), ()), 0, [front, front], 1, budget)
    assert stage is not None
    assert stage.step_seconds == seconds


def test_no_composition_is_smaller_than_the_smallest_points():
    front: Any = KnownFront(list(HULL))
    assert compose(MeshChoice((1,), ()), 0, [front, front], 1, 1.9) is None


def test_a_hull_is_refined_only_in_front_of_the_points_that_layers_take():
    """A solve between points that all layers have moved beyond could not change the stage."""
    front: Any = KnownFront(list(HULL))
    compose(MeshChoice((1,), ()), 0, [front, front], 1, 2.0)
    assert front.refined == [(HULL[2], HULL[3])]
    front.refined.clear()
    compose(MeshChoice((1,), ()), 0, [front, front], 1, 9.0)  # one layer at each of two points
    assert sorted(front.refined, key=lambda pair: pair[0].seconds) == [
        (HULL[0], HULL[1]),
        (HULL[1], HULL[2]),
    ]


def test_no_composition_is_tried_that_needs_too_much_memory_or_time():
    front: Any = KnownFront(list(HULL))
    assert not may_be_faster([front, front], 1, 1.9, inf)
    assert may_be_faster([front, front], 1, 2.0, inf)
    best = compose(MeshChoice((1,), ()), 0, [front, front], 1, 9.0)
    assert best is not None
    assert best.price > 0
    limit, price = best.step_seconds, best.price
    slower: Any = KnownFront([point(3.1, 4.5), point(9.0, 0.5)])
    assert not may_be_faster([slower, slower], 1, 9.0, limit, price)
    faster: Any = KnownFront([point(2.9, 4.5), point(9.0, 0.5)])
    assert may_be_faster([faster, faster], 1, 9.0, limit, price)
    other = compose(MeshChoice((2,), ()), 0, [faster, faster], 1, 9.0)
    assert other is not None
    assert other.step_seconds < best.step_seconds


@pytest.mark.parametrize(
    ("budget", "seconds"), [(20, 2), (16, 3), (12, 4), (9, 6), (6, 8), (2, 16)]
)
def test_no_composition_is_tried_that_is_slower_than_a_limit(budget, seconds):
    """Bounds at several prices of memory rule it out."""
    front: Any = KnownFront(list(HULL))
    assert may_be_faster([front, front], 1, budget, 1.001 * seconds)
    assert not may_be_faster([front, front], 1, budget, 0.7 * seconds)
