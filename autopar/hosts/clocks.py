"""Offsets between the clocks of hosts."""

import time
from collections.abc import Callable

_ROUND_TRIPS = 20


def offset(ask: Callable[[], float], now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds to add to another clock's reading to get this clock's.

    The other clock is assumed to be read in the middle of a round trip, so the error is at most
    half the duration of that trip. The shortest of several trips is used (Cristian, "Probabilistic
    clock synchronization", Distributed Computing 3, 1989).

    Args:
        ask: reads the other clock.
        now: reads this clock.
    """
    trips = [_round_trip(ask, now) for _ in range(_ROUND_TRIPS)]
    return min(trips)[1]


def _round_trip(ask: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """Return the duration of a round trip and the offset that it implies."""
    before = now()
    reading = ask()
    after = now()
    return after - before, (before + after) / 2 - reading
