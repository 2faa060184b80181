"""Peaks of live ranges against a walk over the points."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.live_ranges import (
    LiveRange,
    fullest,
    levels_by_point,
    live_bytes,
    role_of_value,
    roles_at_peak,
)

ROLES = ("parameters", "activations", "temporaries")
POINTS = 6


@st.composite
def live_ranges(draw: st.DrawFn) -> LiveRange:
    first = draw(st.integers(0, POINTS - 1))
    last = draw(st.integers(first, POINTS - 1))
    return LiveRange(first, last, draw(st.integers(0, 99)), draw(st.sampled_from(ROLES)))


def sizes_by_walking(ranges: list[LiveRange]) -> list[dict[str, float]]:
    """Return the bytes by role at each point."""
    points = []
    for point in range(POINTS):
        sizes: dict[str, float] = {}
        for live in ranges:
            if live.first <= point <= live.last and live.num_bytes:
                sizes[live.role] = sizes.get(live.role, 0) + live.num_bytes
        points.append(sizes)
    return points


@given(st.lists(live_ranges()))
def test_live_bytes_and_roles_equal_those_of_a_walk_over_points(ranges: list[LiveRange]) -> None:
    totals = [sum(sizes.values()) for sizes in sizes_by_walking(ranges)]
    assert list(live_bytes((live[:3] for live in ranges), POINTS)) == totals
    assert roles_at_peak(ranges, POINTS) == sizes_by_walking(ranges)[totals.index(max(totals))]
    assert levels_by_point(ranges, POINTS) == sizes_by_walking(ranges)
    assert fullest(levels_by_point(ranges, POINTS)) == roles_at_peak(ranges, POINTS)


def test_the_peak_is_among_the_given_points() -> None:
    ranges = [LiveRange(0, 0, 9, "parameters"), LiveRange(2, 3, 4, "activations")]
    assert roles_at_peak(ranges, POINTS, among=(1, 2, 3)) == {"activations": 4}


def test_a_role_follows_from_the_phases_that_write_and_read() -> None:
    assert role_of_value({"forward"}, {"forward", "backward"}) == "activations"
    assert role_of_value({"backward"}, {"other"}) == "gradients"
    assert role_of_value({"forward"}, {"other"}) == "temporaries"
