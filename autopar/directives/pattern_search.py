"""Find the equations of a model that compute what a pattern computes.

A pattern is a function, traced for arguments of each shape that it may stand for; its equations are then matched backwards along
data edges: operands of commutative primitives in either order, literals by value, functions with a derivative of their own as
a whole. Broadcasts, dims of size one and casts to the same type are looked through, but where dims go must agree. No value
inside a match may be used outside of it.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import jax
from jax.extend.core import Var

from autopar.directives.broadcasts import sizes, source_dims
from autopar.directives.definitions import DirectiveError
from autopar.directives.model_graph import ModelGraph, Node, trace_model
from autopar.directives.pattern_matcher import PatternMatcher, Subgraph
from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of

_ORDERS = 8
"""In how many orders of operands a match is looked at, at most, to choose one."""


def find_pattern(
    graph: ModelGraph,
    visible: Sequence[Node],
    pattern: Callable[..., Any],
    like: Sequence[Any] | None = None,
) -> list[Subgraph]:
    """The places where `visible` nodes compute `pattern`, none of which overlap.

    Args:
        like: shapes and dtypes of the pattern's arguments; without them all have that of some value, and what broadcasts to it.

    Raises:
        DirectiveError: the pattern can't be traced, or doesn't return one array that it has computed.
    """
    found: list[Subgraph] = []
    taken: set[str] = set()
    ways = _traced(graph, visible, pattern, like)
    for node in (each for each in visible if each.eqn.outvars):
        result = node.eqn.outvars[0]
        for way in ways.get(_kind(result), ()):
            matches = PatternMatcher(graph, way, {n.name for n in visible} - taken, like).matches(
                result
            )
            sound = (each for each in matches if _holds(graph, way, pattern, each, result))
            match = max(
                islice(sound, _ORDERS), key=lambda each: _agreement(pattern, each), default=None
            )
            if match is not None:
                found.append(match)
                taken.update(match.nodes)
                break
    return found


type _Kind = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


def _kind(atom: Atom) -> _Kind:
    return aval_of(atom).shape, aval_of(atom).dtype


def _traced(
    graph: ModelGraph,
    visible: Sequence[Node],
    pattern: Callable[..., Any],
    like: Sequence[Any] | None,
) -> dict[_Kind, list[ModelGraph]]:
    """The pattern, by what it returns, for arguments `like` these, or all shaped as one of the values that are seen."""
    if like is None:
        count = len(inspect.signature(pattern).parameters)
        values = [atom for node in visible for atom in (*node.eqn.outvars, *node.eqn.invars)]
        arguments = [
            [jax.ShapeDtypeStruct(*kind)] * count for kind in dict.fromkeys(map(_kind, values))
        ]
    else:
        arguments = [like]
    found: dict[_Kind, list[ModelGraph]] = {}
    failures: list[Exception] = []
    for each in arguments:
        try:
            way = _trace(pattern, each)
        except Exception as error:  # whatever it is: the pattern may be for another shape
            failures.append(error)
            continue
        found.setdefault(_kind(_checked(way).outvars[0]), []).append(way)
    if failures and not found:
        raise DirectiveError(
            f"the pattern can't be traced with arguments all shaped as one of the model's values: {failures[0]}\n"
            "Give their shapes by like="
        ) from failures[0]
    for (
        kind,
        several,
    ) in found.items():  # arguments as the result is, first: that is what elementwise patterns mean
        several.sort(key=lambda way: any(_kind(var) != kind for var in way.args))
    return found


def _trace(pattern: Callable[..., Any], args: Sequence[Any]) -> ModelGraph:
    return trace_model(lambda _, *args: pattern(*args), (), args, None, str)


def _holds(
    graph: ModelGraph, way: ModelGraph, pattern: Callable[..., Any], match: Subgraph, result: Var
) -> bool:
    """Whether the pattern computes `result` of the values that its arguments stand for.

    These may be of lower rank than what it was traced for. Broadcasting makes up for that in what works on each element alone;
    anything else, a sum over rows, must be given the same as when it was traced.
    """
    try:
        again = _trace(
            pattern, [jax.ShapeDtypeStruct(*_kind(graph.values[name])) for name in match.inputs]
        )
    except Exception:  # whatever it is: the pattern is not for such values
        return False
    return _kind(again.outvars[0]) == _kind(result) and _strict(again) == _strict(way)


def _agreement(pattern: Callable[..., Any], match: Subgraph) -> int:
    """How many arguments stand for a value of their name: where operands commute, `bias` is the parameter called so."""
    pairs = zip(inspect.signature(pattern).parameters, match.inputs, strict=False)
    return sum(name == value.rpartition("/")[2] for name, value in pairs)


def _strict(way: ModelGraph) -> list[Any]:
    """The operations that don't broadcast, and the sizes of their operands."""
    nodes = (
        node
        for node in way.nodes
        if record_of(node.eqn).fusion != "elementwise" and source_dims(node.eqn) is None
    )
    return [(node.name, [sizes(atom) for atom in node.eqn.invars]) for node in nodes]


def _checked(pattern: ModelGraph) -> ModelGraph:
    if len(pattern.outvars) != 1 or pattern.outvars[0] not in pattern.producer:
        raise DirectiveError("a pattern returns one array that it has computed")
    return pattern
