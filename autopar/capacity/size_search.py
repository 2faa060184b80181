"""Search for the boundary between sizes that fit and sizes that do not, with few evaluations."""

from collections.abc import Callable, Iterator, Sequence


def boundary(
    holds: Callable[[int], bool], start: int, stop: int, rungs: Sequence[int] = ()
) -> tuple[int, int | None]:
    """Return the last number that has a property, on the way from `start` to `stop`, and the next.

    The rungs are tried from `start` until the property is lost; bisection finds where. The property
    need not be monotone: the two numbers are neighbours, and only the first one has it.

    Args:
        holds: the property; it holds at `start`.
        start: the number to start from.
        stop: the last number, which may be smaller than `start`.
        rungs: the numbers to try first; those between `start` and `stop` count. By default strides
            double.

    Returns:
        The last number with the property, and the next; None if it holds at `stop`.
    """
    sign = 1 if stop >= start else -1
    low = start
    for high in _ladder(start, stop, rungs):
        if not holds(high):
            break
        low = high
    else:
        return stop, None
    while abs(high - low) > 1:
        middle = low + sign * (abs(high - low) // 2)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def _ladder(start: int, stop: int, rungs: Sequence[int]) -> Iterator[int]:
    """Yield the rungs between `start` and `stop` on the way, and `stop` as the last one."""
    sign = 1 if stop >= start else -1
    distance = abs(stop - start)
    if not rungs:
        rungs = [start + sign * (2**k - 1) for k in range(1, distance.bit_length() + 1)]
    between = sorted({sign * rung for rung in rungs if 0 < sign * (rung - start) < distance})
    yield from (sign * rung for rung in between)
    if distance:
        yield stop
