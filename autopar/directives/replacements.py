"""Replacements of equations: functions, and modules as functions of their parameters.

With backend "manual" a function is called with the shards of a device. A module is written for
whole arrays, and so is a function that replaces equations among which a sync applies. These are
traced for whole arrays. Their equations are inlined in place of the replaced ones, and are split
like all others.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import errors, nnx
from flax import linen as nn
from jax.extend.core import Var

from autopar.directives.definitions import DirectiveError, Replace, describe
from autopar.directives.equation_regions import GraphItem, RegionNode, nodes_in
from autopar.directives.model_graph import ModelGraph, Node, join_path, trace_in_scope, within
from autopar.directives.nnx_scopes import call_unchanged
from autopar.ir.graph import aval_of
from autopar.tracing.argument_arrays import abstract

type Functions = Mapping[str, Callable[..., Any]]


class ModuleFunction:
    """A module as a function of (dict of parameters, *inputs), without parameters of its own."""

    def __init__(self, module: nn.Module | nnx.Module) -> None:
        self.module = module
        self.__module__ = type(module).__module__
        self.__qualname__ = type(module).__qualname__
        self.__name__ = type(module).__name__

    def __call__(self, params: dict[str, Any], *inputs: Any) -> Any:
        """Return the result of the module with the given parameters."""
        if isinstance(self.module, nn.Module):
            return self.module.apply({"params": params}, *inputs)
        graphdef, state = nnx.split(self.module)
        filled = [
            (path, _filled(path, variable, params)) for path, variable in nnx.to_flat_state(state)
        ]
        return call_unchanged(graphdef, nnx.from_flat_state(filled), inputs)


def as_function(new: Any) -> Callable[..., Any]:
    """Return a replacement as a function; a module becomes one of its parameters and inputs."""
    return ModuleFunction(new) if isinstance(new, nn.Module | nnx.Module) else new


def call_replacement(
    graph: ModelGraph, region: Replace, functions: Functions, values: Sequence[Any]
) -> list[Any]:
    """Return the results of a replacement.

    Args:
        graph: the model.
        region: the directive.
        functions: the user's functions by name.
        values: the values named `region.inputs`.

    Raises:
        DirectiveError: The function raises an error, or returns another number of arrays than the
            equations that it replaces.
    """
    args = list(values)
    if region.params_first:
        params: dict[str, Any] = {}
        rest = []
        for name, value in zip(region.inputs, values, strict=True):
            if graph.values[name] in graph.params and within(name, region.path):
                _insert(params, name.removeprefix(f"{region.path}/").split("/"), value)
            else:
                rest.append(value)
        args = [params, *rest]
    try:
        results = jax.tree.leaves(functions[region.function](*args))
    except (TypeError, ValueError, NameError, LookupError, errors.FlaxError) as error:
        shapes = ", ".join(_shapes(value) for value in args)
        raise DirectiveError(
            f"{region.function}, in place of {region.name}, fails for ({shapes}): {error}\n"
            "A replacement brings no parameters of its own: it gets the parameters of the function"
            " that it replaces"
        ) from error
    outputs = _outputs(graph, region)
    if len(results) != len(outputs):
        raise DirectiveError(
            f"{region.function} returns {len(results)} arrays in place of {region.name}, which"
            f" makes {len(outputs)}: {', '.join(graph.value_names[var] for var in outputs)}"
        )
    return results


def check_replacement(graph: ModelGraph, region: Replace, functions: Functions) -> None:
    """Raise DirectiveError unless a replacement returns whole arrays like its equations.

    Shapes and dtypes are compared; arguments as for `call_replacement`.
    """
    results = jax.eval_shape(
        lambda *values: call_replacement(graph, region, functions, values),
        *map(_aval, _inputs(graph, region)),
    )
    check_results(graph, region, results, [aval_of(var).shape for var in _outputs(graph, region)])


def check_results(
    graph: ModelGraph, region: Replace, results: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise DirectiveError unless results have the shapes and dtypes of what they replace.

    Args:
        graph: the model.
        region: the directive.
        results: what the replacement returns, for arrays or for their shards.
        shapes: the shapes of what the equations compute, or of its shards.
    """
    for var, result, shape in zip(_outputs(graph, region), results, shapes, strict=True):
        have, dtype = abstract(result), aval_of(var).dtype
        if (have.shape, have.dtype) != (shape, dtype):
            raise DirectiveError(
                f"{region.function}, in place of {region.name}, returns"
                f" {have.dtype}{list(have.shape)} for {graph.value_names[var]}, which is"
                f" {dtype}{list(shape)}"
            )


def inline_replacement(
    graph: ModelGraph, items: Sequence[GraphItem], region: Replace, functions: Functions
) -> tuple[ModelGraph, tuple[GraphItem, ...]]:
    """Return the model with the equations of a replacement instead of those that it replaces.

    Args:
        graph: the model.
        items: its nodes, arranged by region.
        region: the replacement, one of the regions.
        functions: the user's functions by name.

    Returns:
        The new model, and its nodes arranged by region.

    Raises:
        DirectiveError: The function does not map whole arrays to whole arrays like those of the
            equations that it replaces.
    """
    check_replacement(graph, region, functions)
    scope = _common_prefix([graph.by_name[name].scope for name in region.nodes])
    taken = [node.name for node in graph.nodes]
    traced, results, constants = trace_in_scope(
        lambda *values: call_replacement(graph, region, functions, values),
        _inputs(graph, region),
        join_path(scope, region.name),
        taken,
    )
    # Each result is computed by a copy at the end, which gets the variable and the name of the
    # replaced output, so that its readers stay as they are.
    replaced = dict(zip(results, _outputs(graph, region), strict=True))
    nodes: list[Node] = []
    for node in traced:
        result = node.eqn.outvars[0] if node.eqn.outvars else None
        if result in replaced:
            var = replaced[result]
            node = Node(graph.value_names[var], scope, node.eqn.replace(outvars=[var]))
        nodes.append(node)

    def inlined(items: Sequence[GraphItem]) -> Iterator[GraphItem]:
        for item in items:
            if not isinstance(item, RegionNode):
                yield item
            elif item.region is region:
                yield from nodes
            else:
                yield RegionNode(item.region, tuple(inlined(item.inside)))

    new_items = tuple(inlined(items))
    new_graph = dataclasses.replace(
        graph, nodes=nodes_in(new_items), constants={**graph.constants, **constants}
    )
    return new_graph, new_items


def inline_replacement_for_sync(
    graph: ModelGraph, items: Sequence[GraphItem], region: Replace, functions: Functions
) -> tuple[ModelGraph, tuple[GraphItem, ...]]:
    """Inline a replacement that has a sync inside; arguments as for `inline_replacement`."""
    try:
        return inline_replacement(graph, items, region, functions)
    except DirectiveError as error:
        at = f"sch[{region.path!r}]" if region.path else "sch"
        raise DirectiveError(
            f"{describe(region)}: a sync is due inside of what is replaced, so that the function"
            f" must be one of whole arrays, and it is not: {error}\nReplace what is before or after"
            f" the sync only: {at}.decompose(), and then {at}.replace(function,"
            f" {at}.find({region.nodes[0]!r}))"
        ) from error


def _inputs(graph: ModelGraph, region: Replace) -> list[Var]:
    return [graph.values[name] for name in region.inputs]


def _outputs(graph: ModelGraph, region: Replace) -> list[Var]:
    return graph.outputs_of([graph.by_name[name] for name in region.nodes])


def _aval(var: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype)


def _shapes(tree: Any) -> str:
    shapes = jax.tree.map(lambda value: f"{value.dtype}{list(value.shape)}", tree)
    return str(shapes).replace("'", "")


def _common_prefix(scopes: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all scopes."""
    first, *others = [scope.split("/") if scope else [] for scope in scopes]
    count = len(first)
    for other in others:
        count = next(
            (k for k in range(min(count, len(other))) if first[k] != other[k]),
            min(count, len(other)),
        )
    return "/".join(first[:count])


def common_module(names: Sequence[str]) -> str | None:
    """Return the innermost module that contains all named parameters; None for no names."""
    return _common_prefix([name.rpartition("/")[0] for name in names]) if names else None


def _filled(path: Sequence[Any], variable: nnx.Variable, params: Any) -> nnx.Variable:
    """Return `variable` with the value that `params` has at `path`.

    Variables other than parameters keep their value if `params` has none.
    """
    name = "/".join(map(str, path))
    for part in path:
        params = params.get(str(part)) if isinstance(params, dict) else None
    if params is None:
        if isinstance(variable, nnx.Param):
            raise ValueError(f"it needs a parameter {name}")
        return variable
    if params.shape != variable.shape:
        raise ValueError(f"its {name} has shape {variable.shape}, not {params.shape}")
    return variable.replace(params)


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
