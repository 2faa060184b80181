"""Flax nnx models as functions of (state, *args) whose modules open named scopes, as linen's do by themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr, Var

from autopar.directives.definitions import DirectiveError
from autopar.directives.value_layouts import INNER
from autopar.tracing.trace import abstract

MARK = "~"
"""What such a scope begins with: it is the whole path, dots between names, not one name inside another."""


def as_function(model: nnx.Module, updates: bool = False) -> Callable[..., Any]:
    """`model(*args)` as a function of (state, *args), where the state is `nnx.state(model)`.

    With `updates` it returns the result and, as a State, all of the state that are no parameters as they are then: statistics of batch
    normalisation, counts of random numbers. Without, DirectiveError where the call changes something.
    """
    graphdef, _ = nnx.split(model)

    def run(state: Any, *args: Any) -> Any:
        if not updates:
            return call_unchanged(graphdef, state, args, _scoped)
        merged = _scoped(nnx.merge(graphdef, state))
        result = merged(*args)
        return result, nnx.state(merged, nnx.Not(nnx.Param))

    return run


def call_unchanged(
    graphdef: Any,
    state: Any,
    args: Sequence[Any],
    prepare: Callable[[Any], Any] = lambda merged: merged,
) -> Any:
    """What a module of this state makes of `args`. Raises DirectiveError if that changes its state, which nobody would get."""
    merged = prepare(nnx.merge(graphdef, state))
    before = _raw(merged)
    result = merged(*args)
    after = _raw(merged)
    if all(after[path] is value for path, value in before.items()):
        return result
    if changed := _changed(
        graphdef, state, args
    ):  # nnx.jit and nnx.remat hand back all of the state, as it was
        raise DirectiveError(
            f"calling the model changes {', '.join(changed)} of its state, which would be lost: the same mask for every dropout,"
            " statistics that never move. Hand out what changes, create_schedule(..., updates=True), or change nothing: keys as an"
            " argument, dropout(x, rngs=key), BatchNorm with use_running_average=True, or model.eval()"
        )
    return result


def _changed(graphdef: Any, state: Any, args: Sequence[Any]) -> list[str]:
    """The paths of what is not the same array after the call as before."""

    def states(state: Any, *args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        merged = nnx.merge(graphdef, state)
        before = _raw(merged)
        merged(*args)
        after = _raw(merged)
        return before, {path: after[path] for path in before}

    jaxpr, (paths, _) = jax.make_jaxpr(states, return_shape=True)(
        *jax.tree.map(abstract, (state, *args))
    )
    outvars = _handed_through(jaxpr)
    pairs = zip(sorted(paths), outvars[: len(paths)], outvars[len(paths) :], strict=True)
    return [path for path, before, after in pairs if before is not after]


def _handed_through(jaxpr: Jaxpr) -> list[Any]:
    """For each result the value that it is, seen through calls."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive in INNER:
            inner = eqn.params[INNER[eqn.primitive]]
            given = dict(zip(inner.invars, eqn.invars, strict=True))
            for var, result in zip(eqn.outvars, _handed_through(inner), strict=True):
                if isinstance(result, Var) and result in given:
                    same[var] = (
                        same.get(given[result], given[result])
                        if isinstance(given[result], Var)
                        else given[result]
                    )
    return [same.get(atom, atom) if isinstance(atom, Var) else atom for atom in jaxpr.outvars]


def _raw(model: Any) -> dict[str, Any]:
    return {
        "/".join(map(str, path)): v.get_raw_value()
        for path, v in nnx.to_flat_state(nnx.state(model))
    }


def classes(model: nnx.Module) -> dict[str, type]:
    """The class of each module that can be called, by path."""
    named = (("/".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {
        path: type(module)
        for path, module in sorted(named, key=lambda each: each[0])
        if callable(module)
    }


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
