"""CPython workarounds for large graphs: pause the cyclic garbage collector, pre-size stack chunks.

Both act only while autopar traces, plans and compiles a step. When that ends, normally or with an
exception, the collector is enabled again if it was enabled before. No code object of the user is
touched. The only trace left in the process is the generation that objects belong to: after more
than `_MIN_YOUNG_OBJECTS` new objects, all young objects count as old ones, so that the collector
does not scan the graphs at its first opportunity. They are collected with the oldest generation.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

_FRAME_SLOTS = 1 << 16
"""Stack slots of 8 bytes each; CPython allocates a chunk of 1 MiB for them, half of it free."""

_MIN_YOUNG_OBJECTS = 100_000
"""Number of new objects below which a collection takes negligible time."""

_MAX_DEFERRED_OBJECTS = 10_000_000
"""Number of objects, over all pauses, after which a full collection runs."""

_MAX_FROZEN_AT_START = 1_000
"""Upper bound of the objects that CPython itself freezes at its start. More mean that the user
called `gc.freeze`, which `gc.unfreeze` would undo."""

_deferred_objects = 0


def builds_graphs[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that builds large graphs: pause the collector, pre-size the stack.

    CPython 3.12 keeps frames in chunks of 16 KiB. A call that does not fit allocates a chunk from
    the operating system and frees it on return, so a loop at such a depth traces equations at half
    the speed. The wrapper therefore claims a frame of `_FRAME_SLOTS`, which allocates a large chunk
    for the calls below it. Only the code object of the wrapper changes, never that of `fun`.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with paused_gc():
            return fun(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_FRAME_SLOTS)
    return wraps(fun)(call)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block; reference counts still free memory.

    The collector would scan large graphs again and again. A collector that was disabled before
    stays disabled; pauses nest.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _skip_first_collection(gc.get_count()[0])
            gc.enable()


def _skip_first_collection(new_objects: int) -> None:
    """Move all young objects to the oldest generation, or collect it if many were moved before.

    Args:
        new_objects: number of objects allocated since the last collection.
    """
    global _deferred_objects
    if new_objects < _MIN_YOUNG_OBJECTS or gc.get_freeze_count() > _MAX_FROZEN_AT_START:
        return
    _deferred_objects += new_objects
    if _deferred_objects > _MAX_DEFERRED_OBJECTS:
        _deferred_objects = 0
        gc.collect()
    else:
        # unfreeze moves the frozen objects to the oldest generation
        gc.freeze()
        gc.unfreeze()
