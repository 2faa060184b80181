"""How far the clocks of other hosts are from ours."""

import time
from collections.abc import Callable

_ROUND_TRIPS = 20


def offset(ask: Callable[[], float], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to add to what another clock shows, to have what ours does.

    It is read in the middle of a round trip, more or less; the shorter one is, the less it can be off: by half of it at most. So the
    shortest of several tells (Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989).

    Args:
        ask: reads the other clock.
        now: reads ours.
    """
    trips = [_round_trip(ask, now) for _ in range(_ROUND_TRIPS)]
    return min(trips)[1]


def _round_trip(ask: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """What it took, and the offset if the other clock was read halfway."""
    before = now()
    there = ask()
    after = now()
    return after - before, (before + after) / 2 - there
