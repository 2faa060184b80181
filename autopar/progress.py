"""Progress lines on stderr during planning, compilation, training and tuning.

They appear if stderr is a terminal. AUTOPAR_PROGRESS=1 shows them always, AUTOPAR_PROGRESS=0 never.
A listener receives them instead of stderr.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console

PROGRESS_VARIABLE = "AUTOPAR_PROGRESS"


type ProgressListener = Callable[[str, int | None, int | None], None]
"""A function that receives a text, and how many of how many units are done, where it is known."""

_listener: ContextVar[ProgressListener | None] = ContextVar("progress_listener", default=None)


@contextmanager
def progress_listener(listener: ProgressListener) -> Iterator[None]:
    """Pass all progress to a listener while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def log_progress(text: str, done: int | None = None, total: int | None = None) -> None:
    """Print a line of progress to stderr, if progress is shown, or pass it to the listener.

    Args:
        text: what was done.
        done: number of units that are done, where they are counted.
        total: number of units in all.
    """
    if (listener := _listener.get()) is not None:
        listener(text, done, total)
        return
    setting = os.environ.get(PROGRESS_VARIABLE)
    if setting == "1" or (setting != "0" and sys.stderr.isatty()):
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def ranges(numbers: tuple[int, ...]) -> str:
    """Return `0-3` for consecutive numbers, else all numbers, separated by commas."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
