"""Layers are composed from the points of their hulls that fit together in the least time."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from autopar.planning.composition import compose
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
