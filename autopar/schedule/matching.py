"""Finding what a pattern computes among a model's equations.

A pattern is a function, traced at the shape of each result that it may stand for; its equations are then matched backwards along
data edges: operands of commutative primitives in either order, literals by value, functions with a derivative of their own as
a whole. Broadcasts, dims of size one and casts to the same type are looked through, but where dims go must agree. No value
inside a match may be used outside of it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.graph import Atom, aval_of
from autopar.schedule.directives import ScheduleError
from autopar.schedule.graph import ModelGraph, Node, trace_model
from autopar.sharding.rules import POINTWISE

_COMMUTATIVE = frozenset({"add", "add_any", "and", "eq", "max", "min", "mul", "ne", "or", "xor"})
_FREE = frozenset({
    *("out_sharding", "sharding", "weak_type", "precision", "preferred_element_type", "new_sizes", "shape"),
    *("jvp", "jvp_jaxpr_fun", "fwd", "bwd", "fwd_jaxpr_thunk", "num_consts", "symbolic_zeros", "accuracy"),
})  # fmt: skip
"""Parameters that don't say what is computed, beyond what shapes and the other parameters do."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Equations of a model that belong together.

    Attributes:
        nodes: their names, in the order in which they run.
        inputs: the values that a pattern's arguments stand for, in their order; for others what the equations read.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.nodes)}]"


def find_pattern(
    graph: ModelGraph, visible: Sequence[Node], pattern: Callable[..., Any], like: Sequence[Any] | None = None
) -> list[Subgraph]:
    """The places where `visible` nodes compute `pattern`, none of which overlap.

    Args:
        like: shapes and dtypes of the pattern's arguments; without them each has that of the result.

    Raises:
        ScheduleError: the pattern can't be traced, or doesn't return one array that it has computed.
    """
    count = len(inspect.signature(pattern).parameters) if like is None else len(like)

    @cache
    def traced(shape: tuple[int, ...], dtype: Any) -> ModelGraph | Exception:
        avals = [jax.ShapeDtypeStruct(shape, dtype)] * count if like is None else like
        try:
            return trace_model(lambda _, *args: pattern(*args), (), avals, None, str)
        except Exception as error:  # whatever it is: the pattern may be for another shape
            return error

    found: list[Subgraph] = []
    taken: set[str] = set()
    failures: list[Exception] = []
    for node in (each for each in visible if each.eqn.outvars):
        result = node.eqn.outvars[0]
        wanted = traced(aval_of(result).shape, aval_of(result).dtype)
        if isinstance(wanted, Exception):
            failures.append(wanted)
            continue
        match = _Matcher(graph, _checked(wanted), {n.name for n in visible} - taken, like).match(result)
        if match is not None:
            found.append(match)
            taken.update(match.nodes)
    if visible and len(failures) == len(visible):
        raise ScheduleError(
            f"the pattern can't be traced with arguments shaped as any result: {failures[0]}\nGive their shapes by like="
        ) from failures[0]
    return found


def _checked(pattern: ModelGraph) -> ModelGraph:
    if len(pattern.outvars) != 1 or pattern.outvars[0] not in pattern.producer:
        raise ScheduleError("a pattern returns one array that it has computed")
    return pattern


@dataclass(frozen=True, slots=True)
class _Through:
    """What an atom is, looked through broadcasts: the source, for each dim the source's (None: repeated), and the nodes between."""

    source: Atom
    dims: tuple[int | None, ...]
    nodes: tuple[Node, ...]

    @property
    def numpy_like(self) -> bool:
        """Whether the source broadcasts by itself, by NumPy's rules."""
        rank = aval_of(self.source).ndim - len(self.dims)
        return all(source is None or source - dim == rank for dim, source in enumerate(self.dims))

    def order(self, atom: Atom, frame: Sequence[int]) -> tuple[int | None, ...]:
        """Which dim of the source each dim of `frame` is, the shape that `atom` is broadcast to; dims of size one don't count."""
        kept = [dim for dim, size in enumerate(aval_of(self.source).shape) if size != 1]
        own = [kept.index(dim) if dim in kept else None for dim in self.dims]
        if len(own) != len(frame):
            return tuple(own)
        pairs = zip(own, aval_of(atom).shape, frame, strict=True)
        return tuple(dim if size != 1 else None for dim, size, full in pairs if full != 1)


def _look_through(graph: ModelGraph, atom: Atom) -> _Through:
    dims: tuple[int | None, ...] = tuple(range(aval_of(atom).ndim))
    nodes: list[Node] = []
    while isinstance(atom, Var) and atom in graph.producer:
        inner = _source_dims(graph.producer[atom].eqn)
        if inner is None:
            break
        nodes.append(graph.producer[atom])
        dims = tuple(None if dim is None else inner[dim] for dim in dims)
        atom = nodes[-1].eqn.invars[0]
    return _Through(atom, dims, tuple(nodes))


def _source_dims(eqn: JaxprEqn) -> list[int | None] | None:
    """For each dim of the result the operand's that it is; None for equations that compute something."""
    if len(eqn.invars) != 1:
        return None
    source, result = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "copy":
            return list(range(result.ndim))
        case "convert_element_type" if source.dtype == result.dtype:
            return list(range(result.ndim))
        case "broadcast_in_dim":
            at = {d: k for k, d in enumerate(eqn.params["broadcast_dimensions"]) if source.shape[k] == result.shape[d]}
            return [at.get(dim) for dim in range(result.ndim)]
        case "reshape" | "squeeze" | "expand_dims":
            left = [dim for dim, size in enumerate(source.shape) if size != 1]
            right = [dim for dim, size in enumerate(result.shape) if size != 1]
            if [source.shape[dim] for dim in left] != [result.shape[dim] for dim in right]:
                return None
            at = dict(zip(right, left, strict=True))
            return [at.get(dim) for dim in range(result.ndim)]
    return None


type _Pair = tuple[Atom, Atom, JaxprEqn | None, JaxprEqn | None]
"""Atoms of the pattern and of the graph that should be the same, and the equations that read them."""


@dataclass(frozen=True, slots=True)
class _State:
    """A match so far: the graph's nodes for each of the pattern's, its value for each argument, and nodes looked through.

    A pattern's node may be several of the graph that compute the same.
    """

    nodes: dict[str, tuple[Node, ...]]
    bound: dict[Var, _Through]
    between: tuple[Node, ...]


class _Matcher:
    def __init__(self, graph: ModelGraph, pattern: ModelGraph, allowed: set[str], like: Sequence[Any] | None) -> None:
        self.graph, self.pattern, self.allowed = graph, pattern, allowed
        self.shapes = {} if like is None else {v: each.shape for v, each in zip(pattern.args, like, strict=True)}

    def match(self, result: Var) -> Subgraph | None:
        """The subgraph that computes `result` as the pattern does."""
        for state in self._solve([(self.pattern.outvars[0], result, None, None)], _State({}, {}, ())):
            found = self._subgraph(state, result)
            if found is not None:
                return found
        return None

    def _solve(self, pairs: list[_Pair], state: _State) -> Iterator[_State]:
        """Every way to match the pairs."""
        if not pairs:
            yield state
            return
        (wanted, given, reader, other), *rest = pairs
        left, right = _look_through(self.pattern, wanted), _look_through(self.graph, given)
        source = left.source
        if isinstance(source, Literal) or source in self.pattern.constants:
            if self._same_constant(source, right.source):
                yield from self._solve(rest, _State(state.nodes, state.bound, state.between + right.nodes))
        elif source in self.pattern.args:
            if isinstance(right.source, Literal) or not self._is_like(source, (given, right.source)):
                return
            known = state.bound.get(source, right)
            if known.source is right.source:
                yield from self._solve(rest, _State(state.nodes, {source: right, **state.bound}, state.between))
        elif left.order(wanted, _frame(wanted, reader)) == right.order(given, _frame(given, other)):
            yield from self._solve_nodes(source, right, rest, state)

    def _solve_nodes(self, wanted: Var, given: _Through, rest: list[_Pair], state: _State) -> Iterator[_State]:
        left = self.pattern.producer[wanted]
        right = self.graph.producer.get(given.source) if isinstance(given.source, Var) else None
        if right is None or right.name not in self.allowed or not _same_operation(left.eqn, right.eqn):
            return
        if _position(left, wanted) != _position(right, given.source):
            return
        between, known = state.between + given.nodes, state.nodes.get(left.name, ())
        if right in known:
            yield from self._solve(rest, _State(state.nodes, state.bound, between))
            return
        after = _State({**state.nodes, left.name: (*known, right)}, state.bound, between)
        as_written = list(left.eqn.invars)
        commutes = left.eqn.primitive.name in _COMMUTATIVE
        for order in (as_written, as_written[::-1]) if commutes else (as_written,):
            operands = zip(order, right.eqn.invars, strict=True)
            yield from self._solve([(a, b, left.eqn, right.eqn) for a, b in operands] + rest, after)

    def _is_like(self, argument: Var, values: Sequence[Atom]) -> bool:
        """Whether one of `values` has the shape that is wanted of an argument, if any is."""
        shape = self.shapes.get(argument)
        return shape is None or any(aval_of(value).shape == shape for value in values)

    def _same_constant(self, wanted: Atom, given: Atom) -> bool:
        values = []
        for atom, graph in ((wanted, self.pattern), (given, self.graph)):
            if isinstance(atom, Literal):
                values.append(np.asarray(atom.val))
            elif atom in graph.constants:
                values.append(np.asarray(graph.constants[atom]))
            else:
                return False
        left, right = (value.astype(np.float64) if value.dtype != bool else value for value in values)
        return left.shape == right.shape and bool(np.all((left == right) | np.isclose(left, right, rtol=1e-6, atol=0)))

    def _subgraph(self, state: _State, result: Var) -> Subgraph | None:
        """The match as it is, or None when a value inside is used outside."""
        own = {node.name for nodes in (*state.nodes.values(), state.between) for node in nodes}
        if not own <= self.allowed:
            return None
        inputs = []
        for var in self.pattern.args:
            if var not in state.bound:
                raise ScheduleError(f"{self.pattern.args[var]} of the pattern is not used in it")
            inputs.append(self._input(state.bound[var], aval_of(var).shape, own))
        nodes = [node for node in self.graph.nodes if node.name in own]
        if any(var is not result for var in self.graph.outputs_of(nodes)):
            return None
        return Subgraph(tuple(node.name for node in nodes), tuple(self.graph.value_names[var] for var in inputs))

    def _input(self, bound: _Through, shape: tuple[int, ...], own: set[str]) -> Var:
        """The value to bind, before broadcasts that NumPy's rules imply and nobody else uses; these join the match.

        So do changes of shape after which it has no longer that of the pattern's argument.
        """
        values = [*(node.eqn.outvars[0] for node in bound.nodes), bound.source]
        if bound.nodes and bound.numpy_like:
            starts = [len(bound.nodes)]
        else:
            starts = [k for k, value in enumerate(values) if aval_of(value).shape == shape]
        start = next((k for k in starts if self._alone(bound.nodes[:k], own)), 0)
        own.update(node.name for node in bound.nodes[:start])
        value = values[start]
        assert isinstance(value, Var)
        return value

    def _alone(self, nodes: Sequence[Node], own: set[str]) -> bool:
        """Whether `nodes` may join a match and what they make is used in it only."""
        together = own | {node.name for node in nodes}
        members = [node for node in self.graph.nodes if node.name in together]
        made = {var for node in nodes for var in node.eqn.outvars}
        return together - own <= self.allowed and made.isdisjoint(self.graph.outputs_of(members))


def _frame(atom: Atom, reader: JaxprEqn | None) -> Sequence[int]:
    """The shape to which an operand is broadcast where it is read."""
    if reader is not None and reader.primitive.name in POINTWISE:
        return aval_of(reader.outvars[0]).shape
    return aval_of(atom).shape


def _position(node: Node, var: Atom) -> int:
    return next(position for position, each in enumerate(node.eqn.outvars) if each is var)


def _same_operation(left: JaxprEqn, right: JaxprEqn) -> bool:
    if left.primitive is not right.primitive or len(left.invars) != len(right.invars):
        return False
    # What works on each element alone may do so before a broadcast or after.
    alike = left.primitive.name in POINTWISE or _sizes(left) == _sizes(right)
    return alike and _meaning(left) == _meaning(right)


def _sizes(eqn: JaxprEqn) -> list[list[int]]:
    """The shapes of the results, without dims of size one."""
    return [[size for size in aval_of(var).shape if size != 1] for var in eqn.outvars]


def _meaning(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters that say what is computed, in a form that compares."""
    kept = {key: value for key, value in eqn.params.items() if key not in _FREE}
    return {key: str(value) if hasattr(value, "eqns") else value for key, value in kept.items()}
