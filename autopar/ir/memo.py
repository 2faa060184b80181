"""Memoization of analyses of a traced step, because a stage is planned on many meshes."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

_caches: list[Any] = []


def memoized_on_step[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Cache the last 16 results of a function of a step or of a part of it; a decorator."""
    cached = lru_cache(maxsize=16)(function)
    _caches.append(cached)
    return cached  # pyright: ignore[reportReturnType]  # steps are hashed by identity


def forget_steps() -> None:
    """Clear all caches. A cached step keeps its function and its compiled programs alive."""
    for cached in _caches:
        cached.cache_clear()
