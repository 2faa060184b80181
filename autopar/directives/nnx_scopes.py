"""Flax nnx models as functions of (state, *args) whose modules open named scopes.

Linen's modules open scopes themselves, nnx's do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr, Var

from autopar._plugins import assume_cudnn
from autopar.directives.definitions import DirectiveError
from autopar.ir.calls import called_jaxpr
from autopar.tracing.argument_arrays import abstract

MARK = "~"
"""The prefix of the scopes that this module opens. Such a scope is a whole path with dots between
names, not a name inside the enclosing scope."""


def as_function(model: nnx.Module, updates: bool = False) -> Callable[..., Any]:
    """Return `model(*args)` as a function of (`nnx.state(model)`, *args).

    Args:
        model: the model.
        updates: whether the function returns (result, state without parameters) after the call:
            statistics of batch normalization, counters of random numbers. Otherwise it raises
            DirectiveError if the call changes the state.
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
    """Return the result of a module that must not change its state.

    Args:
        graphdef: the module without its state, from `nnx.split`.
        state: its state.
        args: what it is called with.
        prepare: a function of the merged module that is applied before the call.

    Raises:
        DirectiveError: The call changes the state. The change would be lost.
    """
    merged = prepare(nnx.merge(graphdef, state))
    before = _raw(merged)
    result = merged(*args)
    after = _raw(merged)
    if all(after[path] is value for path, value in before.items()):
        return result
    # nnx.jit and nnx.remat return new arrays for unchanged state, so that only the jaxpr shows what
    # changes.
    changed = _changed(graphdef, state, args)
    if changed:
        raise DirectiveError(
            f"calling the model changes {', '.join(changed)} of its state, which would be lost: the"
            " same mask for every dropout, statistics that never move. Return what changes,"
            " create_schedule(..., updates=True), or change nothing: keys as an argument,"
            " dropout(x, rngs=key), BatchNorm with use_running_average=True, or model.eval()"
        )
    return result


def _changed(graphdef: Any, state: Any, args: Sequence[Any]) -> list[str]:
    """Return the paths of the state that the call changes."""

    def states(state: Any, *args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        merged = nnx.merge(graphdef, state)
        before = _raw(merged)
        merged(*args)
        after = _raw(merged)
        return before, {path: after[path] for path in before}

    with assume_cudnn():
        jaxpr, (paths, _) = jax.make_jaxpr(states, return_shape=True)(
            *jax.tree.map(abstract, (state, *args))
        )
    outvars = _unwrapped_outvars(jaxpr)
    pairs = zip(sorted(paths), outvars[: len(paths)], outvars[len(paths) :], strict=True)
    return [path for path, before, after in pairs if before is not after]


def _unwrapped_outvars(jaxpr: Jaxpr) -> list[Any]:
    """Return the results of `jaxpr`; for those that a call returns unchanged, its argument."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        inner = called_jaxpr(eqn)
        if inner is not None:
            arguments = dict(zip(inner.invars, eqn.invars, strict=True))
            for var, result in zip(eqn.outvars, _unwrapped_outvars(inner), strict=True):
                if isinstance(result, Var) and result in arguments:
                    argument = arguments[result]
                    same[var] = same.get(argument, argument) if _is_var(argument) else argument
    return [same.get(atom, atom) if _is_var(atom) else atom for atom in jaxpr.outvars]


def _is_var(atom: Any) -> bool:
    """Return whether `atom` is hashable, which literals are not."""
    return isinstance(atom, Var)


def _raw(model: Any) -> dict[str, Any]:
    """Return the arrays of the state by path."""
    return {
        "/".join(map(str, path)): variable.get_raw_value()
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def classes(model: nnx.Module) -> dict[str, type]:
    """Return the class of each callable module, by path."""
    modules = (("/".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {
        path: type(module)
        for path, module in sorted(modules, key=lambda entry: entry[0])
        if callable(module)
    }


def _scoped(model: Any) -> Any:
    """Return `model` with modules that open a scope when called.

    Each module gets a class of its own, so `model` must be a copy without other users.
    """
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
