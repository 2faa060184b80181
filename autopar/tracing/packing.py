"""Arguments that hold more than arrays, as pytrees of arrays.

JAX's functions take pytrees of arrays. Models often hold more: an Equinox module has activation
functions, rates and flags as leaves, and a step changes nnx modules instead of returning them.
`Packing` turns such arguments into pytrees whose leaves are arrays, as `eqx.filter_jit` and
`nnx.jit` do, and back. It also moves a batch dim that is not the first.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.checks import OptionError, short_repr
from autopar.ir.array_handle import ArrayHandle
from autopar.tracing.arguments import ARRAYS, NUMBERS, is_hashable, static_key
from autopar.tracing.step_traces import TraceError


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Constant:
    """A value as part of the structure of a pytree; it has no leaves.

    Attributes:
        value: the value, which is hashable.
    """

    value: Hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and static_key(self.value) == static_key(other.value)

    def __hash__(self) -> int:
        return hash(static_key(self.value))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleState:
    """The variables of an nnx module in place of it.

    Attributes:
        state: its variables, an `nnx.State`, without the variables of earlier modules.
    """

    state: Any


class Packing:
    """Packs the arguments of one call of a step, and unpacks its result.

    Attributes:
        args: the packed arguments: pytrees of arrays, the batch as their first dim. With nnx
            modules, one more argument without arrays has the structure of the modules.
        count: the number of arguments before they were packed.
    """

    def __init__(
        self,
        args: Sequence[Any],
        static: Sequence[int] = (),
        batch_dims: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Pack arguments.

        Args:
            args: the arguments of the step.
            static: numbers of those that stay as they are.
            batch_dims: the dim that is the batch, by number of argument, where it is not the first.

        Raises:
            TypeError: an argument holds something that is no array and cannot be hashed, or a
                module that another argument holds as well.
            OptionError: an array has too few dims for its batch dim.
        """
        self.count = len(args)
        self._modules: list[Any] = []
        self._dims = {i: dim for i, dim in batch_dims.items() if dim}
        self._constant = [
            i for i, arg in enumerate(args) if i not in static and _holds_constants(arg)
        ]
        packed = list(args)
        for i, arg in enumerate(args):
            if i in static:
                continue
            self._list_modules(i, arg)
            if i in self._constant:
                packed[i] = _with_constants(arg, f"argument {i}")
            if i in self._dims:
                packed[i] = jax.tree.map(partial(_batch_first, i, self._dims[i]), packed[i])
        if self._modules:
            graph, states = _split_modules(self._modules)
            rest = iter(states)
            packed = [_replace_modules(arg, lambda _: ModuleState(next(rest))) for arg in packed]
            packed.append(Constant(graph))
        self.args = tuple(packed)

    def __bool__(self) -> bool:
        """Return whether the packed arguments differ from the arguments."""
        return bool(self._modules or self._constant or self._dims)

    def _list_modules(self, i: int, arg: Any) -> None:
        for module in _modules_of(arg):
            if any(module is other for other in self._modules):
                raise TypeError(
                    f"argument {i} has a {type(module).__name__} that an argument has already; pass"
                    " it once"
                )
            self._modules.append(module)

    def constants(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the constants inside of arguments: number of the argument, path and value."""
        for i in self._constant:
            leaves, _ = jax.tree.flatten_with_path(self.args[i], is_leaf=_is_constant)
            for path, leaf in leaves:
                if _is_constant(leaf):
                    yield i, jax.tree_util.keystr(path), leaf.value

    def step(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fun` as a function from packed arguments to its packed result.

        With nnx modules, the packed result is a tuple of their new states, in the structure of the
        arguments, of the result of `fun`, and of the flags that it has changed, as a `Constant`.
        """
        if not self:
            return fun
        name = getattr(fun, "__name__", "the step")
        # without a reference to the arguments
        dims, has_constants, has_modules = self._dims, bool(self._constant), bool(self._modules)

        def packed_step(*packed: Any) -> Any:
            modules, arguments = _unpacked(packed, dims, has_modules)
            flags = _flags(modules)
            result = fun(*arguments)
            if not has_modules:
                return _with_constants(result, "the result") if has_constants else result
            *states, graph = packed
            new_flags = _flags(modules).items() - flags.items()
            _set_flags(modules, flags)
            new_graph, new_states = _split_modules(modules)
            if new_graph != graph.value:
                raise TraceError(
                    f"{name} adds, removes or replaces variables of an nnx module, or changes an"
                    " attribute that is neither an array nor a flag; do so before the step"
                )
            rest = iter(new_states)
            changed = [_only_states(arg, rest) for arg in states]
            result = _replace_modules(result, partial(_reference, modules, name))
            if has_constants:
                result = _with_constants(result, "the result")
            return *changed, result, Constant(frozenset(new_flags))

        return wraps(fun)(packed_step)

    def arguments(self, packed: Sequence[Any]) -> tuple[Any, ...]:
        """Return packed arguments, such as distributed ones, as the step takes them."""
        return tuple(_unpacked(packed, self._dims, bool(self._modules))[1])

    def result(self, packed: Any) -> Any:
        """Return the result of the step; update the nnx modules that it has changed.

        Args:
            packed: the result of the packed step.
        """
        if not self:
            return packed
        if not self._modules:
            return _without_constants(packed)
        *changed, result, flags = packed
        for module, leaf in zip(self._modules, _states_of(changed), strict=True):
            _nnx().update(module, leaf.state)
        _set_flags(self._modules, dict(flags.value))

        def value(leaf: Any) -> Any:
            match leaf:
                case Constant(_Reference(number)):
                    return self._modules[number]
                case Constant(constant):
                    return constant
            return leaf

        return jax.tree.map(value, result, is_leaf=_is_constant)


def _unpacked(
    packed: Sequence[Any], dims: Mapping[int, int], has_modules: bool
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the nnx modules of packed arguments, and the arguments.

    Args:
        packed: the packed arguments.
        dims: the batch dim, by number of argument, where it is not the first.
        has_modules: whether the last argument is the structure of nnx modules.
    """
    modules: Sequence[Any] = ()
    if has_modules:
        *packed, graph = packed
        modules = _merge_modules(graph.value, [leaf.state for leaf in _states_of(packed)])
        rest = iter(modules)
        packed = _replace_states(packed, lambda _: next(rest))
    moved = [
        jax.tree.map(partial(jnp.moveaxis, source=0, destination=dims[i]), arg)
        if i in dims
        else arg
        for i, arg in enumerate(packed)
    ]
    return modules, _without_constants(moved)


@dataclass(frozen=True)
class _Reference:
    """Stands for an argument's nnx module in a result.

    Attributes:
        number: its number among the modules.
    """

    number: int


def _reference(modules: Sequence[Any], name: str, module: Any) -> Constant:
    """Return the reference to a module in a result of the step called `name`."""
    for number, other in enumerate(modules):
        if other is module:
            return Constant(_Reference(number))
    raise TraceError(
        f"{name} returns a {type(module).__name__} that is none of its arguments; return its"
        " nnx.state, or pass the module and change it"
    )


def _batch_first(i: int, dim: int, leaf: Any) -> Any:
    """Return an array of argument `i` with its batch dim moved to the front."""
    if isinstance(leaf, ArrayHandle):
        raise TypeError(
            f"argument {i} is distributed over hosts, and its batch is dim {dim}; make the batch"
            " its first dim, or pass an array of this process"
        )
    if not -leaf.ndim <= dim < leaf.ndim:
        raise OptionError(
            f"batch_argnums says that the batch is dim {dim} of argument {i}, but an array in it"
            f" has shape {leaf.shape}"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = list(leaf.shape)
        shape.insert(0, shape.pop(dim))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=leaf.weak_type)
    return jnp.moveaxis(leaf, dim, 0) if isinstance(leaf, jax.Array) else np.moveaxis(leaf, dim, 0)


def _holds_constants(arg: Any) -> bool:
    """Return whether `arg` is to be packed: an Equinox module in it, or a leaf that is no array."""
    leaves = jax.tree.leaves(arg, is_leaf=_is_module)
    others = [leaf for leaf in leaves if not isinstance(leaf, ARRAYS) and not _is_module(leaf)]
    if not others:
        return False
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        inside = jax.tree.leaves(arg, is_leaf=lambda leaf: isinstance(leaf, equinox.Module))
        if any(isinstance(leaf, equinox.Module) for leaf in inside):
            return True
    return any(not isinstance(leaf, NUMBERS) for leaf in others)


def _with_constants(tree: Any, what: str) -> Any:
    """Return a pytree with constants for leaves that are no arrays; `what` names it in errors."""

    def packed(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, ARRAYS) or _is_module(leaf):
            return leaf
        if not is_hashable(leaf):
            raise TypeError(
                f"{what} holds {short_repr(leaf)} at {jax.tree_util.keystr(path)}, which is no"
                " array and can't be hashed; close the step over it"
            )
        return Constant(leaf)

    return jax.tree.map_with_path(packed, tree, is_leaf=_is_module)


def _without_constants(tree: Any) -> Any:
    def value(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, Constant) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda leaf: _is_constant(leaf) or _is_module(leaf))


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, Constant)


def _nnx() -> Any:
    """Return Flax's nnx if it has been imported, else None; its import is slow."""
    return sys.modules.get("flax.nnx")


def _is_module(leaf: Any) -> bool:
    """Return whether `leaf` is an nnx module, optimizer, metric or stream of random keys."""
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, nnx.Pytree)


def _modules_of(tree: Any) -> list[Any]:
    if _nnx() is None:
        return []
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_module) if _is_module(leaf)]


def _replace_modules(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    return jax.tree.map(
        lambda leaf: replacement(leaf) if _is_module(leaf) else leaf, tree, is_leaf=_is_module
    )


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, ModuleState)


def _states_of(tree: Any) -> list[ModuleState]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(leaf)]


def _replace_states(tree: Any, replacement: Callable[[Any], Any]) -> Any:
    return jax.tree.map(
        lambda leaf: replacement(leaf) if _is_state(leaf) else leaf, tree, is_leaf=_is_state
    )


type _Flags = Mapping[tuple[Hashable, str], bool | None]
"""Maps the path of a module and the name of an attribute to its value."""


def _flags(modules: Sequence[Any]) -> _Flags:
    """Return the flags of modules and of those inside of them, such as `deterministic`."""
    return {
        (path, name): value
        for path, module in _nested_modules(modules).items()
        for name, value in vars(module).items()
        if value is None or isinstance(value, bool)
    }


def _set_flags(modules: Sequence[Any], flags: _Flags) -> None:
    """Change the flags of modules that differ from `flags`; modules may lack some of these."""
    nested = _nested_modules(modules) if flags else {}
    for (path, name), value in flags.items():
        old = getattr(nested.get(path), name, value)
        if old is not value and (old is None or isinstance(old, bool)):
            setattr(nested[path], name, value)


def _nested_modules(modules: Sequence[Any]) -> dict[Hashable, Any]:
    """Return modules and those inside of them by their paths."""
    if not modules:
        return {}
    nodes = _nnx().iter_graph(tuple(modules))
    return {path: node for path, node in nodes if _is_module(node)}


def _only_states(arg: Any, states: Iterator[Any]) -> Any:
    """Return an argument with new states of its modules, and None for its arrays."""
    return jax.tree.map(
        lambda leaf: ModuleState(next(states)) if _is_state(leaf) else None, arg, is_leaf=_is_state
    )


def _split_modules(modules: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the structure of modules, and the variables of each that none before it has."""
    nnx = _nnx()
    graph, state = nnx.split(tuple(modules))
    return graph, [state[i] if i in state else nnx.State({}) for i in range(len(modules))]


def _merge_modules(graph: Any, states: Sequence[Any]) -> Sequence[Any]:
    nnx = _nnx()
    return nnx.merge(graph, nnx.State({i: state for i, state in enumerate(states) if state}))
