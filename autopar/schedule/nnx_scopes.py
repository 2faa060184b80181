"""Flax nnx models as functions of (state, *args) whose modules open named scopes, as linen's do by themselves."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

MARK = "~"
"""What such a scope begins with: it is the whole path, dots between names, not one name inside another."""


def as_function(model: nnx.Module) -> Callable[..., Any]:
    """`model(*args)` as a function of (state, *args), where the state is `nnx.state(model)`."""
    graphdef, _ = nnx.split(model)
    return lambda state, *args: _scoped(nnx.merge(graphdef, state))(*args)


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
