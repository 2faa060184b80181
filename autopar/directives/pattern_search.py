"""Search a model for the equations that compute what a pattern computes.

A pattern is a function. It is traced for arguments of each shape that occurs in the model, and its
equations are matched backwards along data dependences. Operands of commutative primitives match in
either order, literals match by value, and functions with a derivative rule match as a whole. The
matcher looks through broadcasts, dims of size one and casts to the same type, but the order of dims
must agree. No value inside a match may be used outside of it.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import jax
from jax.extend.core import Var

from autopar.directives.broadcasts import nontrivial_sizes, source_dims
from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import ModelGraph, Node, trace_model
from autopar.directives.pattern_matcher import PatternMatcher, Subgraph
from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of

_ORDERS = 8
"""The number of operand orders of a match that are compared, at most, to choose one."""


def find_pattern(
    graph: ModelGraph,
    visible: Sequence[Node],
    pattern: Callable[..., Any],
    like: Sequence[Any] | None,
) -> list[Subgraph]:
    """Return the disjoint subgraphs of `visible` nodes that compute `pattern`.

    Args:
        graph: the model.
        visible: the nodes that may be part of a match.
        pattern: a function of arrays.
        like: the shapes and dtypes of its arguments. By default all arguments have the shape and
            dtype of one value of the model, or a shape that broadcasts to it.

    Raises:
        DirectiveError: The pattern can't be traced, or does not return one array that it computes.
    """
    subgraphs: list[Subgraph] = []
    taken: set[str] = set()
    traces = _traces_by_result(visible, pattern, like)
    for node in visible:
        if not node.eqn.outvars:
            continue
        result = node.eqn.outvars[0]
        for trace in traces.get(_kind(result), ()):
            matches = PatternMatcher(graph, trace, {n.name for n in visible} - taken, like).matches(
                result
            )
            valid = (match for match in matches if _holds(graph, trace, pattern, match, result))
            best = max(
                islice(valid, _ORDERS), key=lambda match: _agreement(pattern, match), default=None
            )
            if best is not None:
                subgraphs.append(best)
                taken.update(best.nodes)
                break
    return subgraphs


type _Kind = tuple[tuple[int, ...], Any]
"""A shape and a dtype."""


def _kind(atom: Atom) -> _Kind:
    return aval_of(atom).shape, aval_of(atom).dtype


def _traces_by_result(
    visible: Sequence[Node],
    pattern: Callable[..., Any],
    like: Sequence[Any] | None,
) -> dict[_Kind, list[ModelGraph]]:
    """Return traces of the pattern by the shape and dtype of the result.

    It is traced for arguments `like` these, or for arguments all shaped as a value in the model.
    """
    if like is None:
        count = len(inspect.signature(pattern).parameters)
        values = [atom for node in visible for atom in (*node.eqn.outvars, *node.eqn.invars)]
        arguments = [
            [jax.ShapeDtypeStruct(*kind)] * count for kind in dict.fromkeys(map(_kind, values))
        ]
    else:
        arguments = [like]
    traces: dict[_Kind, list[ModelGraph]] = {}
    failures: list[Exception] = []
    for avals in arguments:
        try:
            trace = _trace(pattern, avals)
        # A pattern may raise anything for shapes that it is not meant for.
        except Exception as error:
            failures.append(error)
            continue
        traces.setdefault(_kind(_checked(trace).outvars[0]), []).append(trace)
    if failures and not traces:
        raise DirectiveError(
            "the pattern can't be traced with arguments all shaped as one of the model's values:"
            f" {failures[0]}\nGive their shapes by like="
        ) from failures[0]
    # Arguments shaped as the result come first, which is what elementwise patterns mean.
    for kind, alternatives in traces.items():
        alternatives.sort(key=lambda trace: any(_kind(var) != kind for var in trace.args))
    return traces


def _trace(pattern: Callable[..., Any], args: Sequence[Any]) -> ModelGraph:
    return trace_model(lambda _, *args: pattern(*args), (), args, None, str)


def _holds(
    graph: ModelGraph, trace: ModelGraph, pattern: Callable[..., Any], match: Subgraph, result: Var
) -> bool:
    """Return whether the pattern computes `result` from the values bound to its arguments.

    These may have a lower rank than the arguments for which the pattern was traced. Broadcasting
    makes up for that in elementwise operations. The operands of any other operation, such as a sum
    over rows, must have the same sizes as in the trace.
    """
    avals = [jax.ShapeDtypeStruct(*_kind(graph.values[name])) for name in match.inputs]
    try:
        bound_trace = _trace(pattern, avals)
    # A pattern may raise anything for shapes that it is not meant for.
    except Exception:
        return False
    return _kind(bound_trace.outvars[0]) == _kind(result) and _strict_operations(
        bound_trace
    ) == _strict_operations(trace)


def _agreement(pattern: Callable[..., Any], match: Subgraph) -> int:
    """Return how many arguments are bound to a value of the same name.

    Where operands commute, this binds an argument `bias` to the parameter `bias`.
    """
    pairs = zip(inspect.signature(pattern).parameters, match.inputs, strict=False)
    return sum(name == value.rpartition("/")[2] for name, value in pairs)


def _strict_operations(trace: ModelGraph) -> list[Any]:
    """Return the operations that are not elementwise, and the sizes of their operands."""
    nodes = (
        node
        for node in trace.nodes
        if record_of(node.eqn).fusion != "elementwise" and source_dims(node.eqn) is None
    )
    return [(node.name, [nontrivial_sizes(atom) for atom in node.eqn.invars]) for node in nodes]


def _checked(pattern: ModelGraph) -> ModelGraph:
    computed = (var for var in pattern.outvars if isinstance(var, Var) and var in pattern.producer)
    if len(pattern.outvars) != 1 or not any(computed):
        raise DirectiveError(
            "a pattern returns one array that it has computed, but this one returns"
            f" {len(pattern.outvars)} arrays, or an argument"
        )
    return pattern
