"""Flax nnx models as functions of (state, *args) whose modules open named scopes, as linen's do by themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from autopar.schedule.directives import ScheduleError

MARK = "~"
"""What such a scope begins with: it is the whole path, dots between names, not one name inside another."""


def as_function(model: nnx.Module, updates: bool = False) -> Callable[..., Any]:
    """`model(*args)` as a function of (state, *args), where the state is `nnx.state(model)`.

    With `updates` it returns the result and, as a State, all of the state that are no parameters as they are then: statistics of batch
    normalisation, counts of random numbers. Without, ScheduleError where the call changes something.
    """
    graphdef, _ = nnx.split(model)

    def run(state: Any, *args: Any) -> Any:
        merged = _scoped(nnx.merge(graphdef, state))
        if updates:
            result = merged(*args)
            return result, nnx.state(merged, nnx.Not(nnx.Param))
        with unchanged(merged):
            return merged(*args)

    return run


@contextmanager
def unchanged(model: Any) -> Iterator[Any]:
    """Raise ScheduleError if what is done with `model` in here changes its state, which nobody would get."""
    before = _raw(model)
    yield model
    changed = [path for path, value in _raw(model).items() if path in before and before[path] is not value]
    if changed:
        raise ScheduleError(
            f"calling the model changes {', '.join(changed)} of its state, which would be lost: the same mask for every dropout,"
            " statistics that never move. Hand out what changes, create_schedule(..., updates=True), or change nothing: keys as an"
            " argument, dropout(x, rngs=key), BatchNorm with use_running_average=True, or model.eval()"
        )


def _raw(model: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(model))}


def classes(model: nnx.Module) -> dict[str, type]:
    """The class of each module that can be called, by path."""
    named = (("/".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {path: type(module) for path, module in sorted(named, key=lambda each: each[0]) if callable(module)}


def _scoped(model: Any) -> Any:
    """`model`, a merged copy that nobody else has, each module of a class of its own that opens a scope when called."""
    for path, module in list(nnx.iter_modules(model)):
        if path and callable(module):
            scoped = _in_scope(type(module), MARK + ".".join(map(str, path)))
            object.__setattr__(module, "__class__", scoped)
    return model


def _in_scope(cls: type, scope: str) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return cls.__call__(self, *args, **kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": call})
