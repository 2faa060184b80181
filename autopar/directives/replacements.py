"""What stands in for equations: functions, and modules as functions of their parameters.

A function may be for one device's shards, and is then called with them. A module is written for whole arrays, and so is a function in
which a sync is due: these are traced, and their equations take the place of those that they replace, to be split like all others.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import errors, nnx
from flax import linen as nn
from jax.extend.core import Var

from autopar.directives.definitions import DirectiveError, Replace, describe
from autopar.directives.equation_regions import RegionNode
from autopar.directives.model_graph import ModelGraph, Node, joined, trace_at, within
from autopar.directives.nnx_scopes import call_unchanged
from autopar.ir.graph import aval_of

type Functions = Mapping[str, Callable[..., Any]]


class ModuleFunction:
    """A module as a function of a dict of parameters and its inputs. It brings no parameters of its own."""

    def __init__(self, module: nn.Module | nnx.Module) -> None:
        self.module = module
        self.__module__, self.__qualname__ = type(module).__module__, type(module).__qualname__
        self.__name__ = type(module).__name__

    def __call__(self, params: dict[str, Any], *inputs: Any) -> Any:
        if isinstance(self.module, nn.Module):
            return self.module.apply({"params": params}, *inputs)
        graphdef, state = nnx.split(self.module)
        filled = [
            (path, _filled(path, variable, params)) for path, variable in nnx.to_flat_state(state)
        ]
        return call_unchanged(graphdef, nnx.from_flat_state(filled), inputs)


def as_function(new: Any) -> Callable[..., Any]:
    """A replacement as a function; a module as one of its parameters and inputs."""
    return ModuleFunction(new) if isinstance(new, nn.Module | nnx.Module) else new


def call(
    graph: ModelGraph, region: Replace, functions: Functions, values: Sequence[Any]
) -> list[Any]:
    """What the user's function makes of the values called `region.inputs`. Raises DirectiveError where it fails.

    A function that is given the parameters of `region.path` gets them first, as a dict.
    """
    given = list(values)
    if region.params_first:
        params: dict[str, Any] = {}
        rest = []
        for name, value in zip(region.inputs, values, strict=True):
            if graph.values[name] in graph.params and within(name, region.path):
                _insert(params, name.removeprefix(f"{region.path}/").split("/"), value)
            else:
                rest.append(value)
        given = [params, *rest]
    try:
        results = jax.tree.leaves(functions[region.function](*given))
    except (TypeError, ValueError, NameError, errors.FlaxError) as error:
        shapes = ", ".join(_shapes(value) for value in given)
        raise DirectiveError(
            f"{region.function}, in place of {region.name}, fails for ({shapes}): {error}\n"
            "A replacement brings no parameters of its own: it is given those of what it replaces"
        ) from error
    outputs = _outputs(graph, region)
    if len(results) != len(outputs):
        raise DirectiveError(
            f"{region.function} returns {len(results)} arrays in place of {region.name}, which makes {len(outputs)}:"
            f" {', '.join(graph.value_names[var] for var in outputs)}"
        )
    return results


def check_whole(graph: ModelGraph, region: Replace, functions: Functions) -> None:
    """Raise DirectiveError unless a replacement makes of whole arrays what it replaces does."""
    made = jax.eval_shape(
        lambda *values: call(graph, region, functions, values), *map(_aval, _inputs(graph, region))
    )
    for var, result in zip(_outputs(graph, region), made, strict=True):
        wanted = aval_of(var)
        if (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            raise DirectiveError(
                f"{region.function}, in place of {region.name}, returns {result.dtype}{list(result.shape)} for"
                f" {graph.value_names[var]}, which is {wanted.dtype}{list(wanted.shape)}"
            )


def unfolded(
    graph: ModelGraph, units: Sequence[Node | RegionNode], region: Replace, functions: Functions
) -> tuple[ModelGraph, tuple[Node | RegionNode, ...]]:
    """The model with the equations of a replacement in the place of those that it stands in for. Raises DirectiveError."""
    check_whole(graph, region, functions)
    scope = _common([graph.by_name[name].scope for name in region.nodes])
    taken = [node.name for node in graph.nodes]
    traced, made, constants = trace_at(
        lambda *values: call(graph, region, functions, values),
        _inputs(graph, region),
        joined(scope, region.name),
        taken,
    )
    names = dict(zip(made, _outputs(graph, region), strict=True))
    nodes: list[Node] = []
    for node in traced:  # what others read keeps its name, and is made by the copies at the end
        result = node.eqn.outvars[0] if node.eqn.outvars else None
        if result in names:
            var = names[result]
            node = Node(graph.value_names[var], scope, node.eqn.replace(outvars=[var]))
        nodes.append(node)

    def swapped(unit: Node | RegionNode) -> list[Node | RegionNode]:
        if not isinstance(unit, RegionNode):
            return [unit]
        if unit.region is region:
            return list(nodes)
        return [
            RegionNode(unit.region, tuple(new for each in unit.inside for new in swapped(each)))
        ]

    after = tuple(new for unit in units for new in swapped(unit))
    order = tuple(
        node for unit in after for node in (unit.nodes if isinstance(unit, RegionNode) else (unit,))
    )
    return dataclasses.replace(
        graph, nodes=order, constants={**graph.constants, **constants}
    ), after


def unfolded_for_sync(
    graph: ModelGraph, units: Sequence[Node | RegionNode], region: Replace, functions: Functions
) -> tuple[ModelGraph, tuple[Node | RegionNode, ...]]:
    """The same, for a function in which a sync is due."""
    try:
        return unfolded(graph, units, region, functions)
    except DirectiveError as error:
        at = f"sch[{region.path!r}]" if region.path else "sch"
        raise DirectiveError(
            f"{describe(region)}: a sync is due inside of what is replaced, so that the function must be one of whole arrays, and it is"
            f" not: {error}\nReplace what is before or after the sync only: {at}.decompose(), and then"
            f" {at}.replace(function, {at}.find({region.nodes[0]!r}))"
        ) from error


def _inputs(graph: ModelGraph, region: Replace) -> list[Var]:
    return [graph.values[name] for name in region.inputs]


def _outputs(graph: ModelGraph, region: Replace) -> list[Var]:
    return graph.outputs_of([graph.by_name[name] for name in region.nodes])


def _aval(var: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype)


def _shapes(given: Any) -> str:
    return str(jax.tree.map(lambda value: f"{value.dtype}{list(value.shape)}", given)).replace(
        "'", ""
    )


def _common(scopes: Sequence[str]) -> str:
    """The module that all are in."""
    first, *others = [scope.split("/") if scope else [] for scope in scopes]
    count = len(first)
    for other in others:
        count = next(
            (k for k in range(min(count, len(other))) if first[k] != other[k]),
            min(count, len(other)),
        )
    return "/".join(first[:count])


def common_module(names: Sequence[str]) -> str | None:
    """The module in which all of some parameters are; None without any."""
    return _common([name.rpartition("/")[0] for name in names]) if names else None


def _filled(path: Sequence[Any], variable: nnx.Variable, params: Any) -> nnx.Variable:
    """A variable of a module with what it is given; others than parameters keep what they have."""
    called = "/".join(map(str, path))
    for part in path:
        params = params.get(str(part)) if isinstance(params, dict) else None
    if params is None:
        if isinstance(variable, nnx.Param):
            raise ValueError(f"it needs a parameter {called}")
        return variable
    if params.shape != variable.shape:
        raise ValueError(f"its {called} has shape {variable.shape}, not {params.shape}")
    return variable.replace(params)


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
