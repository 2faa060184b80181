"""Progress lines on stderr during planning, compilation, training and tuning.

They appear if stderr is a terminal. AUTOPAR_PROGRESS=1 shows them always, AUTOPAR_PROGRESS=0 never.
A listener receives them instead of stderr, with the share of the work that is done. Nested
`progress_part` blocks divide the work, so that each function counts its own part from 0 to 1.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

PROGRESS_VARIABLE = "AUTOPAR_PROGRESS"


type ProgressListener = Callable[[str, float | None, float | None], None]
"""A function that receives a text, the share of the work that is done, and the expected seconds of
all of it. The text is empty, and the others are None, where they are unchanged."""

_listener: ContextVar[ProgressListener | None] = ContextVar("progress_listener", default=None)

_part: ContextVar[tuple[float, float]] = ContextVar("progress_part", default=(0.0, 1.0))
"""The shares of all work at which the innermost part begins and ends."""


@contextmanager
def progress_listener(listener: ProgressListener) -> Iterator[None]:
    """Pass all progress to a listener while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def progress_part(
    start: float, end: float, text: str = "", seconds: float | None = None
) -> Iterator[None]:
    """Count the progress of the block as a part of the work around it.

    Args:
        start: share of the work around the block that is done when the block begins.
        end: share that is done when it ends. With `start` again, the block counts nothing.
        text: what the block does; empty to keep the text of the block around it.
        seconds: expected seconds of the block, from which those of all work follow.
    """
    first, last = _part.get()
    part = first + start * (last - first), first + end * (last - first)
    listener = _listener.get()
    if listener is not None:
        length = part[1] - part[0]
        expected = seconds / length if seconds is not None and length else None
        listener(text, part[0], expected)
    token = _part.set(part)
    try:
        yield
        count_progress(1, 1)
    finally:
        _part.reset(token)


def count_progress(done: float, total: float, text: str = "") -> None:
    """Pass how much of the present part is done to the listener, if there is one.

    Args:
        done: number of units that are done.
        total: number of units of the part.
        text: what is being done; empty if that is unchanged.
    """
    if (listener := _listener.get()) is not None:
        first, last = _part.get()
        listener(text, first + (last - first) * done / total, None)


def log_progress(text: str, done: int | None = None, total: int | None = None) -> None:
    """Print a line of progress to stderr, if progress is shown, or pass it to the listener.

    Args:
        text: what was done.
        done: number of units of the present part that are done, where they are counted.
        total: number of its units.
    """
    if (listener := _listener.get()) is not None:
        if done is None or total is None:
            listener(text, None, None)
        else:
            count_progress(done, total, text)
        return
    setting = os.environ.get(PROGRESS_VARIABLE)
    if setting == "1" or (setting != "0" and sys.stderr.isatty()):
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def ranges(numbers: tuple[int, ...]) -> str:
    """Return `0-3` for consecutive numbers, else all numbers, separated by commas."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
