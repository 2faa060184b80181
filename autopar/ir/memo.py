"""Memoization of analyses of a traced step, for the last few steps: a stage is planned on many meshes."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

_remembered: list[Any] = []


def memoized_on_step[**Given, Found](function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Decorates a function of a step, or of a part of it, that is to remember its last answers."""
    cached = lru_cache(maxsize=16)(function)
    _remembered.append(cached)
    return cached  # pyright: ignore[reportReturnType]  # a step is itself alone, and so hashable


def forget_steps() -> None:
    """Forget all of them: a step keeps alive what it was traced from, and what was compiled for it."""
    for cached in _remembered:
        cached.cache_clear()
