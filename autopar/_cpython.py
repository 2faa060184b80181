"""What Python does beside the work while large graphs are built, and how to keep it from that."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

_SLOTS = 1 << 16
"""Of a stack frame that CPython takes a chunk of a MiB for, of which half is left over."""

_FEW = 100_000
"""Objects that are searched for garbage in no time."""

_MANY = 10_000_000
"""Objects, made in all, among which there may be garbage enough to search for."""

_FROZEN = 1_000
"""Objects that CPython has frozen at its start at most; if there are more, somebody has a use for that."""

_unsearched = 0


def builds_graphs[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
    """A decorator for functions that build large graphs: no search for garbage, and room on the stack for what they call.

    CPython keeps frames in chunks of 16 KiB. A call for which there is no room in one takes another from the operating system, and
    gives it back when it returns; a loop that happens to be that deep traces equations at half the speed. So the function is
    called from a frame that claims to be large, which brings a large chunk with it.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with paused_gc():
            return fun(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return wraps(fun)(call)


@contextmanager
def paused_gc() -> Iterator[None]:
    """While it lasts, memory is freed by reference counts alone: the search for garbage would go through large graphs again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _put_off(gc.get_count()[0])
            gc.enable()


def _put_off(made: int) -> None:
    """Spare so many new objects the first search for garbage, which they would survive: they count as old ones, unless it adds up."""
    global _unsearched
    if made < _FEW or gc.get_freeze_count() > _FROZEN:
        return
    _unsearched += made
    if _unsearched > _MANY:
        _unsearched = 0
        gc.collect()
    else:
        gc.freeze()
        gc.unfreeze()
