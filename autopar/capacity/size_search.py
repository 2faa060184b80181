"""Search for the boundary between sizes that fit and sizes that do not, with few evaluations."""

from collections.abc import Callable


def boundary(holds: Callable[[int], bool], start: int, stop: int) -> tuple[int, int | None]:
    """Return the last number that has a property, on the way from `start` to `stop`, and the next.

    Strides double from `start` until the property is lost; bisection finds where. The property need
    not be monotone: what is returned are neighbours, of which the first has it and the second has
    not.

    Args:
        holds: the property; it holds at `start`.
        start: the number to start from.
        stop: the last number, which may be smaller than `start`.

    Returns:
        The last number with the property, and the next; None if it holds at `stop`.
    """
    sign = 1 if stop >= start else -1
    distance = abs(stop - start)
    low, stride = 0, 1
    while True:
        if low == distance:
            return stop, None
        high = min(low + stride, distance)
        if not holds(start + sign * high):
            break
        low, stride = high, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        if holds(start + sign * middle):
            low = middle
        else:
            high = middle
    return start + sign * low, start + sign * high
